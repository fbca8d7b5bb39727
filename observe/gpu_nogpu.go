//go:build !gpu

package observe

import "errors"

func openNVML() (library, error) { return nil, errors.ErrUnsupported }
