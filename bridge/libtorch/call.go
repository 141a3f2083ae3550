package libtorch

// #include <stdlib.h>
// #include "libtorch.h"
import "C"

import (
	"math"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// maxStack bounds arguments and results of one call.
const maxStack = 16

// Optional is an argument of a type like `Tensor?` or `float?` that is given; nil is one that is not.
type Optional struct{ Value any }

// Call runs an operator, as ("aten::mul", "Tensor"), with every argument of its schema in order, defaults too: *Tensor, int64, float64, bool,
// tensor.DType, [Optional] or nil. It gives `results` tensors, which the caller closes; all results of the operator must be tensors. torch's
// Scalar has no form in the ABI: use the overload that takes a 0-dim tensor. Errors: ErrBridge with torch's text.
func Call(op, overload string, results int, args ...any) ([]*Tensor, error) {
	if len(args) > maxStack || results > maxStack {
		return nil, errs.E(errs.ErrBridge, "%s has more than %d arguments or results", op, maxStack)
	}
	var stack [maxStack]C.uint64_t
	for i, arg := range args {
		word, err := encode(arg)
		if err != nil {
			return nil, errs.E(errs.ErrBridge, "%s, argument %d: %w", op, i, err)
		}
		stack[i] = word
	}
	name, variant := C.CString(op), C.CString(overload)
	defer C.free(unsafe.Pointer(name))
	defer C.free(unsafe.Pointer(variant))
	if err := taken(C.eae_torch_call(name, variant, &stack[0])); err != nil {
		return nil, errs.E(errs.ErrBridge, "%s: %w", op, err)
	}
	made := make([]*Tensor, results)
	for i := range made {
		made[i] = &Tensor{word(stack[i])}
	}
	return made, nil
}

// word reads a stack entry as a pointer.
func word(w C.uint64_t) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&w)) }

func encode(arg any) (C.uint64_t, error) {
	switch v := arg.(type) {
	case nil:
		return 0, nil
	case *Tensor:
		// The call takes the handle on its stack over.
		shared, err := v.Share()
		if err != nil {
			return 0, err
		}
		return C.uint64_t(uintptr(shared.handle)), nil
	case int64:
		return C.uint64_t(v), nil
	case float64:
		return C.uint64_t(math.Float64bits(v)), nil
	case bool:
		if v {
			return 1, nil
		}
		return 0, nil
	case tensor.DType:
		number, known := dtypeCodes[v]
		if !known || number < 0 {
			return 0, errs.E(errs.ErrBridge, "torch has no such dtype")
		}
		return C.uint64_t(number), nil
	case Optional:
		inner, err := encode(v.Value)
		if err != nil {
			return 0, err
		}
		return C.eae_torch_some(inner), nil
	}
	return 0, errs.E(errs.ErrBridge, "a %T cannot be passed to torch", arg)
}
