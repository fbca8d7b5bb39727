package residence

import "github.com/euryale-ml/euryale/backend"

// Binder is a device that must be bound to the calling thread before it is used: a CUDA context is current on
// a thread, and a goroutine changes threads. Calls of Bind nest.
type Binder interface {
	Bind() (unbind func(), err error)
}

// Bound runs f with a device bound to the thread, if it is a [Binder].
func Bound(d backend.Device, f func() error) error {
	b, ok := d.(Binder)
	if !ok {
		return f()
	}
	unbind, err := b.Bind()
	if err != nil {
		return err
	}
	defer unbind()
	return f()
}
