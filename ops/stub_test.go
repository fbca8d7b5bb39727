package ops

import (
	"cmp"
	"errors"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
)

// stub is a communicator for building graphs: it cannot run anything.
type stub struct {
	name       string
	rank, size int
}

var errStub = errors.New("a stub runs nothing")

func (s stub) Name() string         { return cmp.Or(s.name, "world") }
func (s stub) Rank() int            { return s.rank }
func (s stub) Size() int            { return s.size }
func (stub) Device() backend.Device { return host.Device{} }

func (stub) Capabilities() backend.Capabilities { return backend.Capabilities{} }
func (stub) Start(backend.Queue, backend.Collective, backend.Buffer, backend.Buffer) (backend.Work,
	error) {
	return nil, errStub
}
func (stub) Alloc(int) (backend.Buffer, error)            { return backend.Buffer{}, errStub }
func (stub) Free(backend.Buffer) error                    { return errStub }
func (stub) Split(int, int) (backend.Communicator, error) { return nil, errStub }
func (stub) Abort(error)                                  {}
func (stub) Err() error                                   { return nil }
func (stub) Close() error                                 { return nil }
