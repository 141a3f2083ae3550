package api

import (
	"errors"
	"strconv"
	"strings"

	"github.com/eae-runtime/eae-runtime/bridge/dlpack"
	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// StorePutAll is StorePut for many boundaries of one tensor each, in their order: "key:address" pairs, separated by commas. Every tensor is taken
// over; those that can be stored are, and the error tells of the others.
func StorePutAll(h int64, pairs string) error {
	return guard(func() error {
		store, refused := stores.get(h)
		faults := []error{refused}
		for _, pair := range strings.Split(pairs, ",") {
			key, address, err := parsePair(pair)
			if err != nil {
				faults = append(faults, err)
				continue
			}
			t, err := dlpack.Import(address)
			switch {
			case err != nil:
				faults = append(faults, err)
			case refused != nil:
				t.Free()
			default:
				faults = append(faults, store.PutOne(key, *t))
			}
		}
		return errors.Join(faults...)
	})
}

func parsePair(pair string) (key, address int64, err error) {
	first, second, _ := strings.Cut(pair, ":")
	key, err = strconv.ParseInt(first, 10, 64)
	if err == nil {
		address, err = strconv.ParseInt(second, 10, 64)
	}
	if err != nil {
		return 0, 0, errs.E(errs.ErrValue, "%q is no pair of a key and an address", pair)
	}
	return key, address, nil
}
