//go:build !gpu

package nccl

import "errors"

func load() (library, error) {
	return nil, errors.New("this program was built without GPU support: build it with -tags gpu (euryale env prints the flags it takes)")
}
