//go:build !gpu

package gpu

import "errors"

// hasDriver leaves it to load to say what is missing.
func hasDriver() error { return nil }

func load() (library, error) {
	return nil, errors.New("this program was built without GPU support: build it with -tags gpu (euryale env prints the flags it takes)")
}
