package backend

import "fmt"

// NotImplemented is an [Arithmetic] whose functions all return ErrUnsupported. A
// queue embeds it and implements the functions that it has:
//
//	type Queue struct {
//		backend.NotImplemented
//		...
//	}
type NotImplemented struct{}

var _ Arithmetic = NotImplemented{}

func lacking(function string) error {
	return fmt.Errorf("%w: this device's queues do not implement %s", ErrUnsupported, function)
}

// Zero returns ErrUnsupported.
func (NotImplemented) Zero(Buffer) error { return lacking("Zero") }

// Copy returns ErrUnsupported.
func (NotImplemented) Copy(_, _ Buffer) error { return lacking("Copy") }

// Copy2D returns ErrUnsupported.
func (NotImplemented) Copy2D(_ Buffer, _ int, _ Buffer, _, _, _ int) error {
	return lacking("Copy2D")
}

// Cast returns ErrUnsupported.
func (NotImplemented) Cast(_, _ Buffer) error { return lacking("Cast") }

// CastScale returns ErrUnsupported.
func (NotImplemented) CastScale(_, _ Buffer, _ float64) error { return lacking("CastScale") }

// Divide returns ErrUnsupported.
func (NotImplemented) Divide(_, _ Buffer, _ int) error { return lacking("Divide") }

// Reduce returns ErrUnsupported.
func (NotImplemented) Reduce(ReduceOp, Buffer, ...Buffer) error { return lacking("Reduce") }

// Move returns ErrUnsupported.
func (NotImplemented) Move(_, _ Buffer) error { return lacking("Move") }

// CopyStrided returns ErrUnsupported.
func (NotImplemented) CopyStrided(_, _ Buffer, _, _ []int) error { return lacking("CopyStrided") }
