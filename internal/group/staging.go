package group

import (
	"context"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Staged runs a call on host buffers: it copies src to comm's device, calls start with the copies,
// which starts the call on q, and copies dst back. What is on the device already
// stays as it is, and so does a buffer of no elements, which stands for one that this rank does
// not use. Staged returns when the call is done, since somebody must copy the result back.
func Staged(comm backend.Communicator, q backend.Queue, dst, src backend.Buffer,
	start func(dst, src backend.Buffer) (backend.Work, error)) (w backend.Work, err error) {
	s := staging{device: comm.Device()}
	nearDst, dstErr := s.stage(dst)
	nearSrc, srcErr := s.stage(src)
	defer func() {
		if left := s.free(); left != nil { // else err stays what it is, for type assertions
			err = errors.Join(err, left)
		}
	}()
	err = errors.Join(dstErr, srcErr)
	if err == nil && !onDevice(src) {
		err = q.Move(nearSrc, src)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: to the device: %w", backend.RankOf(comm), err)
	}
	if w, err = start(nearDst, nearSrc); err != nil {
		return nil, err
	}
	if err = w.Join(context.Background()); err != nil {
		return nil, err
	}
	if !onDevice(dst) {
		if err = copyAndWait(q, dst, nearDst); err != nil {
			return nil, fmt.Errorf("%s: from the device: %w", backend.RankOf(comm), err)
		}
	}
	return w, nil
}

func onDevice(b backend.Buffer) bool { return b.Len() == 0 || b.Device() }

// staging is memory of a device for one call.
type staging struct {
	device backend.Device
	copies []backend.Buffer
}

// stage returns memory of the device for what is in b: b itself if it is there.
func (s *staging) stage(b backend.Buffer) (backend.Buffer, error) {
	if onDevice(b) {
		return b, nil
	}
	staged, err := s.device.Alloc(b.NBytes())
	if err != nil {
		return b, fmt.Errorf("a copy of %d bytes on %s: %w", b.NBytes(), s.device.Name(), err)
	}
	s.copies = append(s.copies, staged)
	return staged.As(b.DType()), nil
}

func (s *staging) free() error {
	var errs []error
	for _, b := range s.copies {
		errs = append(errs, s.device.Free(b))
	}
	return errors.Join(errs...)
}

// copyAndWait copies, and waits until that is done.
func copyAndWait(q backend.Queue, dst, src backend.Buffer) error {
	if err := q.Move(dst, src); err != nil {
		return err
	}
	done, err := q.Record()
	if err != nil {
		return err
	}
	return done.Join(context.Background())
}
