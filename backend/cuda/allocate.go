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

// wordBytes is the most that one element takes.
const wordBytes = 8

// block is memory as package tensor sees it.
type block struct {
	addr   uintptr
	nbytes int
	host   []byte // where it is the host's
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

// Alloc returns memory for package tensor, which makes tensors with it that last until Reset: by
// tensor.New with this engine, or by Clone. It is not zeroed. Up to 8 bytes, which is all that
// tensors of one element take, are host memory.
func (e *Engine) Alloc(size int64) (tensor.Memory, error) {
	if size < 0 {
		return nil, fmt.Errorf("cuda: alloc: %w: %d bytes", backend.ErrArgument, size)
	}
	if size <= wordBytes {
		b := make([]byte, wordBytes)
		e.mu.Lock()
		e.small = append(e.small, b)
		e.mu.Unlock()
		return block{uintptr(unsafe.Pointer(unsafe.SliceData(b))), int(size), b}, nil
	}
	var b backend.Buffer
	err := e.on("alloc", func() (err error) {
		b, err = e.memory.take(int(size))
		return err
	})
	if err != nil {
		return nil, err
	}
	return block{b.Addr(), int(size), nil}, nil
}

// Free frees the memory of a tensor from ToDevice. Reset recycles that of results.
func (e *Engine) Free(mem tensor.Memory, _ int64) error {
	return e.on("free", func() error { return e.memory.free(mem.Uintptr()) })
}

// memoryBytes returns the buffer of memory that package tensor passes.
func (e *Engine) memoryBytes(mem tensor.Memory) (backend.Buffer, error) {
	switch m := mem.(type) {
	case block:
		if m.host != nil {
			return backend.Of(m.host[:m.nbytes]), nil
		}
		return backend.OnDevice(backend.U8, m.addr, m.nbytes), nil
	case *tensor.Dense:
		return e.bytes(m.Raw), nil
	case interface{ Uint8s() []uint8 }: // what a tensor keeps its elements in
		return e.bytes(m.Uint8s()), nil
	}
	return backend.Buffer{}, fmt.Errorf("%w: memory of type %T", backend.ErrUnsupported, mem)
}

// Memcpy copies the shorter length of dst and src, between the host and the
// device as it must.
func (e *Engine) Memcpy(dst, src tensor.Memory) error {
	return e.on("memcpy", func() error {
		from, err := e.memoryBytes(src)
		if err != nil {
			return fmt.Errorf("source: %w", err)
		}
		to, err := e.memoryBytes(dst)
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
	return e.on("memset", func() error {
		d, err := dtype(tensor.Dtype{Type: reflect.TypeOf(val)})
		if err != nil {
			return err
		}
		number := reflect.ValueOf(val)
		value := number.Convert(reflect.TypeFor[float64]()).Float()
		if number.CanInt() && int64(value) != number.Int() {
			return fmt.Errorf("%w: the integer %v: use one up to 2^53", backend.ErrUnsupported, val)
		}
		b, err := e.memoryBytes(mem)
		if err != nil {
			return err
		}
		return e.at(b).Fill(b.As(d), value)
	})
}

// Memclr zeroes memory. It cannot return an error: it leaves memory of others unchanged.
func (e *Engine) Memclr(mem tensor.Memory) {
	_ = e.on("memclr", func() error {
		b, err := e.memoryBytes(mem)
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
