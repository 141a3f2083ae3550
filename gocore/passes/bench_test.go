package passes

import (
	"fmt"
	"testing"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// BenchmarkPasses takes 16 Mi float32 values (64 MiB) through one pass with two workers and a warm destination; MB/s counts the source once.
// "copy" is the empty chain, that is, memory speed.
func BenchmarkPasses(b *testing.B) {
	const n = 16 << 20
	src := of32(wave(n)...)
	warm := make([]uint64, n/2)
	buffers := BufferFunc(func(int64) (unsafe.Pointer, func(), error) {
		return unsafe.Pointer(unsafe.SliceData(warm)), func() {}, nil
	})
	workers := NewWorkers(2)
	defer workers.Close()
	cases := []struct{ name, spec string }{
		{"copy", ``},
		{"int8", `{"name":"int8"}`},
		{"clip", `{"name":"clip","params":{"max_norm":0.5}}`},
		{"clip_unchanged", `{"name":"clip","params":{"max_norm":1e9}}`},
		{"regularization", `{"name":"regularization","params":{"strength":0.1}}`},
		{"fp16", `{"name":"fp16"}`},
		{"bf16", `{"name":"bf16"}`},
		{"fp8_e4m3fn", `{"name":"fp8"}`},
		{"fp8_scaled", `{"name":"fp8","params":{"scaling":"tensor"}}`},
		{"regularization_fp16_bf16", `{"name":"regularization","params":{"strength":0.1}},{"name":"fp16"},{"name":"bf16"}`},
		{"noise", `{"name":"gaussian_noise","params":{"std":0.1}}`},
		{"logging", `{"name":"logging"}`},
	}
	for _, c := range cases {
		b.Run(c.name, func(b *testing.B) {
			list, err := parse("[" + c.spec + "]")
			if err != nil {
				b.Fatal(err)
			}
			chain := ChainOf(workers, list...)
			b.SetBytes(4 * n)
			for b.Loop() {
				g := &Grad{Src: []tensor.Tensor{src}}
				if err := chain.Apply(&Context{Buffers: buffers, Stats: true, MoveUnchanged: c.name == "clip_unchanged"}, g); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkSmall is the fixed cost of a chain of three on a small tensor.
func BenchmarkSmall(b *testing.B) {
	for _, n := range []int{16, 4096} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			chain, err := NewChain(`[{"name":"clip"},{"name":"int8"},{"name":"bf16"}]`)
			if err != nil {
				b.Fatal(err)
			}
			defer chain.Close()
			src := of32(wave(n)...)
			for b.Loop() {
				if err := chain.Apply(&Context{}, &Grad{Src: []tensor.Tensor{src}}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
