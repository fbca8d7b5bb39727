//go:build !gpu

package driver

import "errors"

// Available returns nil if there is a CUDA driver with a device, and otherwise
// an error that says what is missing.
func Available() error {
	return errors.New("this program was built without GPU support: build it with -tags gpu")
}
