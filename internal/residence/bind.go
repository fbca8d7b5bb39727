package residence

import "github.com/euryale-ml/euryale/backend"

// Binder is a device that must be bound to the calling thread before it is used: a CUDA context is
// current on a thread, and a goroutine changes threads. Calls of Bind nest.
type Binder interface {
	Bind() (unbind func(), err error)
}

// Bind binds a device to the thread until unbind is called, if it is a [Binder].
func Bind(d backend.Device) (unbind func(), err error) {
	if b, ok := d.(Binder); ok {
		return b.Bind()
	}
	return func() {}, nil
}

// Bound runs f with a device bound to the thread, if it is a [Binder].
func Bound(d backend.Device, f func() error) error {
	unbind, err := Bind(d)
	if err != nil {
		return err
	}
	defer unbind()
	return f()
}
