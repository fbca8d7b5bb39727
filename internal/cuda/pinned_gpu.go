//go:build gpu

package cuda

/*
#include <cuda.h>

static int euryale_kind(CUdeviceptr address)
{
	unsigned int kind = 0;

	if (cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) != CUDA_SUCCESS)
		return 0;
	return kind;
}

static int euryale_ordinal(CUdeviceptr address)
{
	int ordinal = -1;

	if (cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) !=
		CUDA_SUCCESS)
		return -1;
	return ordinal;
}
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
)

// Copies from and to memory of Go go through pinned buffers, as many as may be
// filled at a time.
const (
	stagingBytes   = 4 << 20
	stagingBuffers = 4
)

// staging is a pinned buffer and the end of its last use.
type staging struct {
	memory backend.Buffer
	last   Event
}

func newStaging() (chan *staging, error) {
	all := make(chan *staging, stagingBuffers)
	for range stagingBuffers {
		b, err := pin(stagingBytes)
		if err != nil {
			return nil, errors.Join(err, freeStaging(all))
		}
		all <- &staging{memory: b}
	}
	return all, nil
}

func freeStaging(all chan *staging) error {
	var errs []error
	for len(all) > 0 {
		errs = append(errs, unpin((<-all).memory))
	}
	return errors.Join(errs...)
}

// pin returns host memory that every device of the process can copy from and to.
func pin(nbytes int) (backend.Buffer, error) {
	var p unsafe.Pointer
	if code := C.cuMemHostAlloc(&p, C.size_t(max(nbytes, 1)),
		C.CU_MEMHOSTALLOC_PORTABLE); code != C.CUDA_SUCCESS {
		return backend.Buffer{}, fmt.Errorf("pin %d bytes of host memory: %w", nbytes,
			failure(int(code)))
	}
	clear(unsafe.Slice((*byte)(p), nbytes))
	return backend.Host(backend.U8, p, nbytes), nil
}

func unpin(b backend.Buffer) error {
	if b.Addr() == 0 {
		return nil
	}
	return cu.MemFreeHost(hostPointer(b))
}

// hostPointer returns the address of host memory.
func hostPointer(b backend.Buffer) unsafe.Pointer {
	return unsafe.Pointer(unsafe.SliceData(b.Bytes()))
}

// AllocHost returns nbytes of pinned host memory, zeroed, to be given back with
// FreeHost: Move to and from it does not stop the host. The garbage collector
// knows nothing of it.
func (d *Device) AllocHost(nbytes int) (b backend.Buffer, err error) {
	if nbytes <= 0 {
		return b, d.named("pinned memory", fmt.Errorf("%w: %d bytes", backend.ErrArgument, nbytes))
	}
	err = d.on("pinned memory", func() error {
		b, err = pin(nbytes)
		return err
	})
	return b, err
}

// FreeHost gives back memory from AllocHost. Work that uses it must be done.
func (d *Device) FreeHost(b backend.Buffer) error {
	if b.Device() || b.Len() == 0 {
		return d.named("free pinned memory", fmt.Errorf("%w: no pinned memory",
			backend.ErrArgument))
	}
	return d.onRetained("free pinned memory", func() error { return unpin(b) })
}

// kindOf asks the driver what memory an address is, 0 for memory of Go.
func kindOf(addr uintptr) int { return int(C.euryale_kind(C.CUdeviceptr(addr))) }

// ordinalOf asks the driver whose memory an address is, -1 if it does not know.
func ordinalOf(addr uintptr) int { return int(C.euryale_ordinal(C.CUdeviceptr(addr))) }

// isPinned reports whether the driver can copy host memory by itself.
func isPinned(b backend.Buffer) bool { return kindOf(b.Addr()) == C.CU_MEMORYTYPE_HOST }

// upload copies host to device memory of the same size.
func (q *Queue) upload(dst, src backend.Buffer) error {
	if isPinned(src) {
		return cu.MemcpyHtoDAsync(cu.DevicePtr(dst.Addr()), hostPointer(src), int64(src.Len()),
			q.stream)
	}
	return q.staged(src.Len(), func(s *staging, lo, hi int) error {
		copy(s.memory.Bytes(), src.Slice(lo, hi).Bytes())
		return cu.MemcpyHtoDAsync(cu.DevicePtr(dst.Slice(lo, hi).Addr()), hostPointer(s.memory),
			int64(hi-lo), q.stream)
	})
}

// download copies device to host memory of the same size. It waits, unless the
// host memory is pinned: somebody must copy from the staging buffer.
func (q *Queue) download(dst, src backend.Buffer) error {
	if isPinned(dst) {
		return cu.MemcpyDtoHAsync(hostPointer(dst), cu.DevicePtr(src.Addr()), int64(dst.Len()),
			q.stream)
	}
	return q.staged(dst.Len(), func(s *staging, lo, hi int) error {
		err := cu.MemcpyDtoHAsync(hostPointer(s.memory), cu.DevicePtr(src.Slice(lo, hi).Addr()),
			int64(hi-lo), q.stream)
		if err == nil {
			err = q.drain()
		}
		if err == nil {
			copy(dst.Slice(lo, hi).Bytes(), s.memory.Bytes())
		}
		return err
	})
}

// staged runs f for pieces of nbytes bytes, each with a staging buffer that
// nobody uses.
func (q *Queue) staged(nbytes int, f func(s *staging, lo, hi int) error) error {
	if q.recording.Load() != nil {
		return fmt.Errorf("%w: memory of Go in a graph, which the host copies: use memory from "+
			"AllocHost", backend.ErrArgument)
	}
	for lo := 0; lo < nbytes; lo += stagingBytes {
		if err := q.stage(lo, min(lo+stagingBytes, nbytes), f); err != nil {
			return err
		}
	}
	return nil
}

func (q *Queue) stage(lo, hi int, f func(s *staging, lo, hi int) error) error {
	s := <-q.device.staging
	defer func() { q.device.staging <- s }()
	if err := s.last.Join(context.Background()); err != nil {
		return err
	}
	err := f(s, lo, hi)
	if err != nil {
		return err
	}
	s.last, err = q.Mark()
	return err
}
