//go:build !gpu

package gpu

import "errors"

func open(int) (Device, error) { return nil, errNoGPU }

// hasDriver leaves it to load to say what is missing.
func hasDriver() error { return nil }

func load() (library, error) { return nil, errNoGPU }

var errNoGPU = errors.New("this program was built without GPU support: build it with -tags gpu " +
	"(euryale env prints the flags it takes)")
