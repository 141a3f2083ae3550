package api

import (
	"strconv"
	"strings"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/bridge/dlpack"
	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// address turns an integer into the pointer that it is. The memory is not Go's.
func address(a int64) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&a)) }

// parseInts reads comma separated integers; "" is none.
func parseInts(text string) ([]int64, error) {
	if text == "" {
		return nil, nil
	}
	parts := strings.Split(text, ",")
	numbers := make([]int64, len(parts))
	for i, part := range parts {
		n, err := strconv.ParseInt(strings.TrimSpace(part), 10, 64)
		if err != nil {
			return nil, errs.E(errs.ErrValue, "%q is no list of integers", text)
		}
		numbers[i] = n
	}
	return numbers, nil
}

// formatInts is the inverse of parseInts.
func formatInts(numbers []int64) string {
	var text strings.Builder
	for i, n := range numbers {
		if i > 0 {
			text.WriteByte(',')
		}
		text.WriteString(strconv.FormatInt(n, 10))
	}
	return text.String()
}

// dtypes are the torch names of the types that a pool can lend.
var dtypes = map[string]tensor.DType{
	"float16": tensor.Float16, "bfloat16": tensor.BFloat16, "float32": tensor.Float32, "float64": tensor.Float64,
	"complex64": {Code: tensor.CodeComplex, Bits: 64, Lanes: 1}, "complex128": {Code: tensor.CodeComplex, Bits: 128, Lanes: 1},
	"int8": tensor.Int8, "int16": {Code: tensor.CodeInt, Bits: 16, Lanes: 1},
	"int32": {Code: tensor.CodeInt, Bits: 32, Lanes: 1}, "int64": tensor.Int64,
	"uint8": tensor.Uint8, "uint16": {Code: tensor.CodeUint, Bits: 16, Lanes: 1},
	"uint32": {Code: tensor.CodeUint, Bits: 32, Lanes: 1}, "uint64": {Code: tensor.CodeUint, Bits: 64, Lanes: 1},
	"bool": tensor.Bool,
}

func parseDType(name string) (tensor.DType, error) {
	dtype, ok := dtypes[strings.TrimPrefix(name, "torch.")]
	if !ok {
		return dtype, errs.E(errs.ErrValue, "the dtype %q is not one that a pool can lend", name)
	}
	return dtype, nil
}

// importAll takes over all the tensors, also when one of them is refused: then those before it are released and those after it too.
func importAll(addresses []int64) ([]*tensor.Tensor, error) {
	taken := make([]*tensor.Tensor, 0, len(addresses))
	var first error
	for _, a := range addresses {
		t, err := dlpack.Import(a)
		switch {
		case err == nil:
			taken = append(taken, t)
		case first == nil:
			first = err
		}
	}
	if first != nil {
		freeAll(taken)
		return nil, first
	}
	return taken, nil
}

// exportAll hands all the tensors out, or none: on error all are released.
func exportAll(tensors []*tensor.Tensor) ([]int64, error) {
	addresses := make([]int64, 0, len(tensors))
	for i, t := range tensors {
		a, err := dlpack.Export(t)
		if err != nil {
			freeAll(tensors[i+1:])
			for _, made := range addresses {
				dlpack.Delete(made)
			}
			return nil, err
		}
		addresses = append(addresses, a)
	}
	return addresses, nil
}

func freeAll(tensors []*tensor.Tensor) {
	for _, t := range tensors {
		t.Free()
	}
}
