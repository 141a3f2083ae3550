//go:build !(goexperiment.simd && amd64)

package passes

// The plain loops do all of it here, see Note [Wide loops].

func wideAbsMax([]float32) (top uint32, done int) { return 0, 0 }

func wideInt8(dst, src []float32, scale float32) int { return 0 }

func wideScale(dst, src []float32, factor float32) int { return 0 }

func wideSquares(lanes *[4]float64, v []float32) int { return 0 }
