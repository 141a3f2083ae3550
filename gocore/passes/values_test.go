package passes

import (
	"encoding/hex"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func TestValues(t *testing.T) {
	scale := float32(2) / 127
	overflown := float32(3e38) * float32(1/(float64(float32(3e38))*math.Sqrt2))
	cases := []struct {
		name, spec string
		scale      float64
		in, want   []float32
		meta       string
	}{
		{"clip halves", `{"name":"clip","params":{"max_norm":2.5}}`, 0, []float32{3, 4}, []float32{float32(float32(1/float32(5.000001))*2.5) * 3, float32(float32(1/float32(5.000001))*2.5) * 4}, ``},
		{"clip at the norm", `{"name":"clip","params":{"max_norm":5}}`, 0, []float32{3, 4}, []float32{3, 4}, `[{"name":"clip","clip_factor":1,"norm":5}]`},
		{"clip below the norm under a loss scale", `{"name":"clip","params":{"max_norm":1}}`, 65536, []float32{0.02 * 65536, negZero}, []float32{0.02 * 65536, negZero}, ``},
		{"clip above the norm under a loss scale", `{"name":"clip","params":{"max_norm":0}}`, 2, []float32{2, -2}, []float32{0, negZero}, ``},
		{"clip where float32 squares overflow", `{"name":"clip"}`, 0, []float32{3e38, 0}, []float32{0.99999994, 0}, ``},
		{"clip whose norm overflows float32", `{"name":"clip"}`, 0, []float32{3e38, -3e38}, []float32{overflown, -overflown}, ``},
		{"clip subnormals", `{"name":"clip","params":{"max_norm":0}}`, 0, []float32{1e-45, -1e-40}, []float32{0, negZero}, ``},
		{"int8", `{"name":"int8"}`, 0, []float32{2, -2, 0, negZero, 0.5 * scale, 1.5 * scale, -0.4 * scale}, []float32{127 * scale, -127 * scale, 0, negZero, 0, 2 * scale, negZero}, ``},
		{"int8 of zeros", `{"name":"int8"}`, 0, []float32{0, negZero}, []float32{0, negZero}, `[{"name":"int8"}]`},
		{"int8 whose scale underflows", `{"name":"int8"}`, 0, []float32{1e-45, negZero}, []float32{1e-45, negZero}, `[{"name":"int8"}]`},
		{"int8 reports", `{"name":"int8"}`, 0, []float32{127}, []float32{127}, `[{"name":"int8","quantization_scale":1}]`},
		{"fp16", `{"name":"fp16"}`, 0, []float32{65519, 65520, -inf, nan, 0x1p-25, 0x1.8p-25, negZero}, []float32{65504, inf, -inf, nan, 0, 0x1p-24, negZero}, ``},
		{"bf16", `{"name":"bf16"}`, 0, []float32{1 + 0x1p-8, 1 + 0x1.8p-8, 3.4e38, inf, nan}, []float32{1, 1 + 0x1p-7, inf, inf, nan}, ``},
		{"fp8 e4m3fn", `{"name":"fp8"}`, 0, []float32{1.0625, 1.1875, 448, 1e9, 0x1p-10, 0x1.8p-10, negZero, inf, -inf, nan}, []float32{1, 1.25, 448, 448, 0, 0x1p-9, negZero, inf, -inf, nan}, ``},
		{"fp8 e5m2", `{"name":"fp8","params":{"format":"e5m2"}}`, 0, []float32{1.125, 61439, 61440, -inf, nan}, []float32{1, 57344, inf, -inf, nan}, ``},
		{"fp8 scaled", `{"name":"fp8","params":{"scaling":"tensor"}}`, 0, []float32{896, -896, 2.125, 0}, []float32{896, -896, 2, 0}, `[{"name":"fp8","quantization_scale":2}]`},
		{"fp8 scaled zeros", `{"name":"fp8","params":{"scaling":"tensor"}}`, 0, []float32{0, 0}, []float32{0, 0}, `[{"name":"fp8"}]`},
		{"regularization", `{"name":"regularization","params":{"strength":0.25}}`, 0, []float32{4, negZero, inf, nan}, []float32{3, negZero, inf, nan}, ``},
		{"regularization 0", `{"name":"regularization"}`, 0, []float32{4, negZero}, []float32{4, negZero}, ``},
		{"noise 0", `{"name":"gaussian_noise"}`, 0, []float32{4, negZero, nan}, []float32{4, negZero, nan}, ``},
		{"noise keeps NaN and Inf", `{"name":"gaussian_noise","params":{"std":1}}`, 0, []float32{nan, inf, -inf}, []float32{nan, inf, -inf}, ``},
		{"logging", `{"name":"logging"}`, 2, []float32{2, 6}, []float32{2, 6}, `[{"name":"logging","has_inf":false,"has_nan":false,"max":3,"mean":2,"min":1,"norm":3.1622776601683795,"numel":2,"std":1}]`},
		{"logging of one", `{"name":"logging"}`, 0, []float32{-3}, []float32{-3}, `[{"name":"logging","has_inf":false,"has_nan":false,"max":-3,"mean":-3,"min":-3,"norm":3,"numel":1,"std":0}]`},
		{"logging of none", `{"name":"logging"}`, 0, nil, nil, `[{"name":"logging","has_inf":false,"has_nan":false,"max":0,"mean":0,"min":0,"norm":0,"numel":0,"std":0}]`},
		{"logging NaN", `{"name":"logging"}`, 0, []float32{nan, inf}, []float32{nan, inf}, `[{"name":"logging","has_inf":true,"has_nan":true,"max":NaN,"mean":NaN,"min":NaN,"norm":NaN,"numel":2,"std":NaN}]`},
		{"logging Inf", `{"name":"logging"}`, 0, []float32{1, -inf}, []float32{1, -inf}, `[{"name":"logging","has_inf":true,"has_nan":false,"max":1,"mean":-Infinity,"min":-Infinity,"norm":Infinity,"numel":2,"std":NaN}]`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			out, chain := apply(t, "["+c.spec+"]", &Grad{Src: []tensor.Tensor{of32(c.in...)}, LossScale: c.scale})
			got := slice[float32](&out[0], 0, int64(len(c.in)))
			for i, want := range c.want {
				if want != want {
					require.True(t, got[i] != got[i], "element %d is %v", i, got[i])
					continue
				}
				require.Equal(t, math.Float32bits(want), math.Float32bits(got[i]), "element %d is %v, want %v", i, got[i], want)
			}
			if c.meta != "" {
				require.Equal(t, c.meta, chain.Meta())
			}
		})
	}
}

func TestNormsAreJointUnlessPerTensor(t *testing.T) {
	src := []tensor.Tensor{as(tensor.Float64, 3), as(tensor.BFloat16, 4), of32()}
	_, chain := apply(t, `[{"name":"clip","params":{"max_norm":100}},{"name":"clip","params":{"max_norm":100,"per_tensor":true}},{"name":"int8"},{"name":"logging"}]`,
		&Grad{Src: src})
	reports := chain.Reports()
	require.Equal(t, 5.0, reports[0].Values["norm"])
	require.Equal(t, []any{3.0, 4.0, 0.0}, reports[1].Values["norm"])
	require.Len(t, reports[2].Values["quantization_scale"], 2, "an empty tensor has no scale")
	require.Equal(t, int64(2), reports[3].Values["numel"])
}

func TestLoggingOnlyWhenAsked(t *testing.T) {
	chain := ChainOf(nil, &Logging{})
	g := &Grad{Src: []tensor.Tensor{of32(1)}}
	require.NoError(t, chain.Apply(&Context{Stats: true}, g))
	require.NotEmpty(t, chain.Reports()[0].Values)
	require.NoError(t, chain.Apply(&Context{}, g))
	require.Equal(t, `[{"name":"logging"}]`, chain.Meta())
}

func TestInt8Bytes(t *testing.T) {
	data, err := EncodeInt8([]byte{9}, []float32{127, -127, 0.5, 1.5, -2.5, negZero})
	require.NoError(t, err)
	require.Equal(t, "09"+"45414938"+"0000803f"+"0600000000000000"+"7f"+"81"+"00"+"02"+"fe"+"00", hex.EncodeToString(data))
	values, err := DecodeInt8([]float32{8}, data[1:])
	require.NoError(t, err)
	require.Equal(t, []float32{8, 127, -127, 0, 2, -2, 0}, values)

	data, err = EncodeInt8(nil, nil)
	require.NoError(t, err)
	require.Equal(t, "45414938"+"00000000"+"0000000000000000", hex.EncodeToString(data))

	for _, bad := range []float32{nan, inf, -inf} {
		_, err = EncodeInt8(nil, []float32{1, bad})
		require.ErrorIs(t, err, errs.ErrPass)
	}
	for name, text := range map[string]string{"empty": "", "other header": "45414939" + "0000803f" + "0000000000000000",
		"short": "45414938" + "0000803f" + "0200000000000000" + "01", "long": "45414938" + "0000803f" + "0000000000000000" + "01",
		"-128": "45414938" + "0000803f" + "0100000000000000" + "80", "negative scale": "45414938" + "000080bf" + "0000000000000000",
		"NaN scale": "45414938" + "0000c07f" + "0000000000000000", "huge": "45414938" + "0000803f" + "ffffffffffffffff" + "01"} {
		raw, err := hex.DecodeString(text)
		require.NoError(t, err)
		out, err := DecodeInt8([]float32{1}, raw)
		require.ErrorIs(t, err, errs.ErrPass, name)
		require.Equal(t, []float32{1}, out, name)
	}
}

// The payload decodes to what the pass gives, but for the sign of zero.
func TestInt8BytesAreThePass(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		values := rapid.SliceOfN(rapid.Float32Range(-1e30, 1e30), 1, 40).Draw(rt, "values")
		data, err := EncodeInt8(nil, values)
		require.NoError(t, err)
		decoded, err := DecodeInt8(nil, data)
		require.NoError(t, err)
		if math.Float32frombits(absMaxBits(values))/127 == 0 {
			return
		}
		out, _ := apply(t, `[{"name":"int8"}]`, &Grad{Src: []tensor.Tensor{of32(values...)}})
		require.Equal(t, slice[float32](&out[0], 0, int64(len(values))), decoded)
	})
}

func FuzzDecodeInt8(f *testing.F) {
	seed, err := EncodeInt8(nil, []float32{1, -3, 0.2})
	require.NoError(f, err)
	f.Add(seed)
	f.Fuzz(func(t *testing.T, data []byte) {
		values, err := DecodeInt8(nil, data)
		if err != nil {
			require.ErrorIs(t, err, errs.ErrPass)
			return
		}
		require.Len(t, values, len(data)-Int8Header)
	})
}

// Naive forms of the passes on float32, one line of mathematics each.
func TestPassesAgreeWithNaiveForms(t *testing.T) {
	top := func(v []float32) (m float32) {
		for _, x := range v {
			m = max(m, float32(math.Abs(float64(x))))
		}
		return m
	}
	naive := map[string]func(v []float32, i int) float32{
		`{"name":"int8"}`: func(v []float32, i int) float32 {
			s := top(v) / 127
			return float32(max(min(math.RoundToEven(float64(v[i]/s)), 127), -127)) * s
		},
		`{"name":"clip","params":{"max_norm":0.5}}`: func(v []float32, i int) float32 {
			sum := 0.0
			for _, x := range v {
				sum += float64(x) * float64(x)
			}
			if norm := float32(math.Sqrt(sum)); norm > 0.5 {
				return v[i] * (1 / (norm + 1e-6) * 0.5)
			}
			return v[i]
		},
		`{"name":"regularization","params":{"strength":0.3}}`: func(v []float32, i int) float32 { return v[i] * float32(1-0.3) },
	}
	for spec, f := range naive {
		rapid.Check(t, func(rt *rapid.T) {
			values := rapid.SliceOfN(rapid.Float32Range(-1e6, 1e6), 1, 60).Draw(rt, "values")
			if top(values) < 1e-30 {
				values[0] = 1
			}
			out, _ := apply(t, "["+spec+"]", &Grad{Src: []tensor.Tensor{of32(values...)}})
			for i, got := range slice[float32](&out[0], 0, int64(len(values))) {
				want := f(values, i)
				require.InDelta(t, want, got, 1e-6*math.Abs(float64(want)), "element %d", i)
			}
		})
	}
}
