//go:build !gpu

package driver

import "errors"

func status() error {
	return errors.New("this program was built without GPU support: build it with -tags gpu")
}
