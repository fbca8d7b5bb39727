//go:build gpu

package cuda

import (
	"errors"
	"math"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
	gpukernels "github.com/euryale-ml/euryale/kernels/cuda"
)

// CopyMany implements [backend.Arithmetic]: one launch, and one copy of the list
// of buffers to the device, 32 bytes for each, which does not stop the host.
func (a *arithmetic) CopyMany(dsts, srcs []backend.Buffer) error {
	if err := (kernels.Check{Device: true}).CopyMany(dsts, srcs); err != nil {
		return err
	}
	flat, offsets := spanOf(dsts)
	table, err := gpukernels.NewTable(srcs, offsets)
	if err != nil || flat.Len() == 0 {
		return err
	}
	list := table.Words()
	words := backend.Host(backend.I64, unsafe.Pointer(unsafe.SliceData(list)), len(list))
	onDevice, err := a.queue.Alloc(words.NBytes())
	if err != nil {
		return err
	}
	err = a.Move(onDevice.As(backend.I64), words)
	if err == nil {
		err = a.Pack(flat, table, onDevice)
	}
	return errors.Join(err, a.queue.Free(onDevice))
}

// spanOf returns the memory from the first to the last of the buffers, and where
// in it they begin, in bytes.
func spanOf(buffers []backend.Buffer) (flat backend.Buffer, offsets []int) {
	lo, hi := uintptr(math.MaxUint), uintptr(0)
	for _, b := range buffers {
		if b.Len() > 0 {
			lo, hi = min(lo, b.Addr()), max(hi, b.Addr()+uintptr(b.NBytes()))
		}
	}
	offsets = make([]int, len(buffers))
	if hi == 0 {
		return flat, offsets
	}
	for i, b := range buffers {
		if b.Len() > 0 {
			offsets[i] = int(b.Addr() - lo)
		}
	}
	return backend.OnDevice(backend.U8, lo, int(hi-lo)), offsets
}
