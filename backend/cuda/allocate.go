package cuda

import (
	"fmt"
	"reflect"
	"unsafe"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// Package tensor calls the methods of this file when it makes and copies tensors
// of the engine itself.
var (
	_ tensor.Engine       = (*Engine)(nil)
	_ tensor.NonStdEngine = (*Engine)(nil)
)

// block is memory as package tensor sees it.
type block struct {
	addr   uintptr
	nbytes int
	host   []byte // keeps host memory reachable
}

func (b block) Uintptr() uintptr { return b.addr }
func (b block) MemSize() uintptr { return uintptr(b.nbytes) }

// AllocAccessible returns false: Go code must not touch the memory.
func (e *Engine) AllocAccessible() bool { return false }

// NonStdAlloc says that memory is not Go's own.
func (e *Engine) NonStdAlloc() {}

// WorksWith returns true: operands in any order are brought into row-major
// order.
func (e *Engine) WorksWith(tensor.DataOrder) bool { return true }

// Alloc returns memory for package tensor, which makes tensors with it that end
// with the run: by tensor.New with this engine, Clone, Materialize or Transpose.
// It must be written to before it is read. Up to 8 bytes, which is all that
// tensors of one element take, are host memory.
func (e *Engine) Alloc(size int64) (tensor.Memory, error) {
	if size < 0 {
		return nil, fmt.Errorf("cuda: alloc: %w: %d bytes", backend.ErrArgument, size)
	}
	if size <= 8 {
		b := make([]byte, 8)
		e.mu.Lock()
		e.small = append(e.small, b)
		e.mu.Unlock()
		return block{uintptr(unsafe.Pointer(unsafe.SliceData(b))), int(size), b}, nil
	}
	var b backend.Buffer
	err := e.on("alloc", func() (err error) {
		b, err = e.memory.take(int(size), false)
		return err
	})
	if err != nil {
		return nil, err
	}
	return block{b.Addr(), int(size), nil}, nil
}

// Free frees the memory of a tensor from ToDevice, or ends an Adopt. Reset recycles the
// results of a run.
func (e *Engine) Free(mem tensor.Memory, _ int64) error {
	if mem.MemSize() == 0 {
		return nil
	}
	e.watches.change(mem.Uintptr(), int(mem.MemSize()))
	return e.on("free", func() error { return e.memory.free(mem.Uintptr()) })
}

// memoryBytes returns the buffer of memory that package tensor passes.
func (e *Engine) memoryBytes(mem tensor.Memory, how access) (backend.Buffer, error) {
	switch m := mem.(type) {
	case block:
		if m.host != nil {
			return backend.Of(m.host[:m.nbytes]), nil
		}
		_, err := e.memory.locate(m.addr, m.nbytes, how)
		if err == nil && how == writing {
			e.watches.change(m.addr, m.nbytes)
		}
		return backend.OnDevice(backend.U8, m.addr, m.nbytes), err
	case *tensor.Dense:
		return e.bytes(m.Raw, how)
	case interface{ Uint8s() []uint8 }: // what a tensor keeps its elements in
		return e.bytes(m.Uint8s(), how)
	}
	return backend.Buffer{}, fmt.Errorf("%w: memory of type %T", backend.ErrUnsupported, mem)
}

// Memcpy copies the shorter length of dst and src, between the host and the
// device as it must.
func (e *Engine) Memcpy(dst, src tensor.Memory) error {
	return e.on("memcpy", func() error {
		from, err := e.memoryBytes(src, reading)
		if err != nil {
			return fmt.Errorf("source: %w", err)
		}
		to, err := e.memoryBytes(dst, writing)
		if err != nil {
			return fmt.Errorf("destination: %w", err)
		}
		n := min(to.Len(), from.Len())
		return e.copyBytes(to.Slice(0, n), from.Slice(0, n))
	})
}

func (e *Engine) copyBytes(dst, src backend.Buffer) error {
	switch {
	case dst.Device() != src.Device():
		return e.move(dst, src)
	case dst.Device():
		return e.dev.Copy(dst, src)
	}
	return e.host.Copy(dst, src)
}

// Memset fills memory with a Go number.
func (e *Engine) Memset(mem tensor.Memory, val any) error {
	value, err := e.scalar("memset", tensor.Dtype{Type: reflect.TypeOf(val)}, val)
	if err != nil {
		return err
	}
	return e.on("memset", func() error {
		d, err := DType(tensor.Dtype{Type: reflect.TypeOf(val)})
		if err != nil {
			return err
		}
		b, err := e.memoryBytes(mem, writing)
		if err != nil {
			return err
		}
		return e.at(b).Fill(b.As(d), value)
	})
}

// Memclr zeroes memory. It cannot return an error: it leaves memory of others unchanged.
func (e *Engine) Memclr(mem tensor.Memory) {
	_ = e.on("memclr", func() error {
		b, err := e.memoryBytes(mem, writing)
		if err != nil {
			return err
		}
		return e.at(b).Zero(b)
	})
}

// Accessible always fails: copy tensors with ToHost.
func (e *Engine) Accessible(tensor.Memory) (tensor.Memory, error) {
	return nil, fmt.Errorf("cuda: %w: device memory cannot be read in place: copy the tensor with ToHost", backend.ErrUnsupported)
}
