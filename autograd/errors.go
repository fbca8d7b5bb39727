package autograd

import (
	"fmt"
	"strings"
)

// prefix is what errors of the package begin with.
const prefix = "autograd: "

// wrapped is fmt.Errorf of an error that may be of this package: its prefix is said once.
func wrapped(format string, args ...any) error { return once{fmt.Errorf(format, args...)} }

type once struct{ error }

func (e once) Error() string { return prefix + strings.ReplaceAll(e.error.Error(), prefix, "") }
func (e once) Unwrap() error { return e.error }
