package autograd

import (
	"context"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/residence"
)

// Solo returns a communicator of one rank on the host, which exchanges nothing: a program that
// trains alone passes it to [New] to save and load checkpoints, or to vm.WithDataParallel for the
// options of this package, even if the machine is on a device.
//
//	dp, err := autograd.New(autograd.Solo(), learnables)
//	...
//	err = dp.Save(dir, solver, progress)
func Solo() backend.Communicator { return solo{} }

// solo is the only rank of its group.
type solo struct{}

func (solo) Name() string                       { return "solo" }
func (solo) Rank() int                          { return 0 }
func (solo) Size() int                          { return 1 }
func (solo) Device() backend.Device             { return soloDevice{} }
func (solo) Capabilities() backend.Capabilities { return backend.Capabilities{} }
func (solo) Alloc(nbytes int) (backend.Buffer, error) {
	return soloDevice{}.Alloc(nbytes)
}
func (solo) Free(backend.Buffer) error { return nil }
func (solo) Abort(error)               {}
func (solo) Err() error                { return nil }
func (solo) Close() error              { return nil }

// Start implements [backend.Communicator]: whatever is exchanged with nobody is a copy.
func (s solo) Start(
	q backend.Queue, c backend.Collective, dst, src backend.Buffer,
) (backend.Work, error) {
	if _, err := c.Check(0, 1, dst, src); err != nil {
		return nil, err
	}
	if q != nil {
		if err := drain(q); err != nil { // what src comes from
			return nil, err
		}
	}
	copy(dst.Bytes(), src.Bytes())
	return backend.Finished(nil), nil
}

// Split implements [backend.Communicator].
func (s solo) Split(color, _ int) (backend.Communicator, error) {
	if color < 0 {
		return nil, nil
	}
	return s, nil
}

// soloDevice is the host, with queues that run everything on the caller.
type soloDevice struct{}

func (soloDevice) Name() string                     { return "host" }
func (soloDevice) Default() backend.Queue           { return soloQueue{} }
func (soloDevice) NewQueue() (backend.Queue, error) { return soloQueue{}, nil }
func (soloDevice) Free(backend.Buffer) error        { return nil }

// Alloc implements [backend.Device].
func (soloDevice) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes < 0 {
		return backend.Buffer{}, fmt.Errorf("%w: alloc of %d bytes", backend.ErrArgument, nbytes)
	}
	return residence.Zeros(backend.U8, nbytes), nil
}

// soloQueue has done everything when a call returns.
type soloQueue struct{ kernels.Host }

func (soloQueue) Record() (backend.Event, error) { return past{}, nil }
func (soloQueue) Wait(e backend.Event) error     { return e.Join(context.Background()) }
func (soloQueue) Close() error                   { return nil }

// past is an event that has happened.
type past struct{}

func (past) Join(context.Context) error { return nil }
func (past) Done() bool                 { return true }
