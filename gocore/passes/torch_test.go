package passes

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// testdata/torch.json holds inputs and what eager torch makes of them on the CPU, as bits: t.to(small).to(t.dtype), t*(1.0-s),
// clamp(round(t/scale),-127,127)*scale, and t*(max/(norm+1e-6)).to(t.dtype) with the norm summed in float64.
func TestBitsOfEagerTorch(t *testing.T) {
	var file struct {
		Cases []struct {
			Name, DType string
			In          []string
			Out         map[string][]string
		}
	}
	text, err := os.ReadFile("testdata/torch.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &file))
	require.NotEmpty(t, file.Cases)
	specs := map[string]string{"fp8_e4m3fn": `{"name":"fp8"}`, "fp8_e5m2": `{"name":"fp8","params":{"format":"e5m2"}}`,
		"fp16": `{"name":"fp16"}`, "bf16": `{"name":"bf16"}`, "int8": `{"name":"int8"}`}
	for _, c := range file.Cases {
		for op, want := range c.Out {
			spec := specs[op]
			if kind, value, ok := strings.Cut(op, "_"); ok && spec == "" {
				param := map[string]string{"clip": "max_norm", "regularization": "strength"}[kind]
				spec = fmt.Sprintf(`{"name":%q,"params":{%q:%s}}`, kind, param, value)
			}
			out, _ := apply(t, "["+spec+"]", &Grad{Src: []tensor.Tensor{fromHex(t, c.DType, c.In)}})
			got, expected := bitsOf(out[0]), bitsOf(fromHex(t, c.DType, want))
			for i := range expected {
				require.Equal(t, expected[i], got[i], "%s of %s %s, element %d: %s", op, c.DType, c.Name, i, c.In[i])
			}
		}
	}
}

func fromHex(t *testing.T, dtype string, list []string) tensor.Tensor {
	t.Helper()
	d := map[string]tensor.DType{"float32": tensor.Float32, "float64": tensor.Float64, "float16": tensor.Float16, "bfloat16": tensor.BFloat16}[dtype]
	data := make([]uint64, len(list)+1)
	out := over(data[:len(list)], d)
	for i, text := range list {
		v, err := strconv.ParseUint(text, 16, 64)
		require.NoError(t, err)
		switch d.Size() {
		case 2:
			slice[uint16](&out, int64(i), 1)[0] = uint16(v)
		case 4:
			slice[uint32](&out, int64(i), 1)[0] = uint32(v)
		default:
			slice[uint64](&out, int64(i), 1)[0] = v
		}
	}
	return out
}

// The same division over many random operands, quotients near half integers among them.
func TestInt8KernelDividesLikeDivision(t *testing.T) {
	state := uint32(1)
	next := func() uint32 {
		state = Philox([4]uint32{state}, [2]uint32{9})[0]
		return state
	}
	for range 300 {
		scale := math.Float32frombits(next()%0x7000_0000 + 0x0080_0000)
		src := make([]float32, 507)
		for i := range src {
			src[i] = (float32(next()%254) - 126.5) * scale
			if bits := math.Float32bits(src[i]) + next()%5 - 2; i%2 == 0 && src[i] != 0 {
				src[i] = math.Float32frombits(bits)
			}
			src[i] = max(min(src[i], 127*scale), -127*scale)
		}
		dst := make([]float32, len(src))
		int8Kernel(scale)(dst, src, 0)
		for i, x := range src {
			want := float32(math.Copysign(math.RoundToEven(float64(x/scale)), float64(x))) * scale
			require.Equal(t, math.Float32bits(want), math.Float32bits(dst[i]), "%v / %v", x, scale)
		}
	}
}
