//go:build gpu

package cuda

/*
#cgo noescape euryale_launch
#cgo nocallback euryale_launch
#include <cuda.h>

// The parameters are handed over as bytes, which spares a list of pointers.
static CUresult euryale_launch(CUfunction f, unsigned int gx, unsigned int gy, unsigned int bx, unsigned int by,
	CUstream stream, void *params, size_t nbytes)
{
	void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, params, CU_LAUNCH_PARAM_BUFFER_SIZE, &nbytes, CU_LAUNCH_PARAM_END};
	return cuLaunchKernel(f, gx, gy, 1, bx, by, 1, 0, stream, NULL, extra);
}
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/cu"
)

// Loaded holds the kernels of one context.
type Loaded struct {
	modules   []cu.Module
	functions map[Entry]C.CUfunction
}

// Load loads every kernel into the calling thread's context, so that nothing is
// loaded later, while other work runs on the device.
func Load() (*Loaded, error) {
	texts, err := PTX()
	if err != nil {
		return nil, err
	}
	l := &Loaded{functions: map[Entry]C.CUfunction{}}
	for family, text := range texts {
		if err := l.load(text); err != nil {
			return nil, errors.Join(
				fmt.Errorf("load the %s kernels: %w: they need a driver for CUDA 11 and a device of compute capability 8.0, or newer", family, err),
				l.Unload())
		}
	}
	return l, nil
}

func (l *Loaded) load(text string) error {
	entries, err := Entries(text)
	if err != nil {
		return err
	}
	m, err := cu.LoadData(text)
	if err != nil {
		return err
	}
	l.modules = append(l.modules, m)
	for _, e := range entries {
		f, err := m.Function(e.String())
		if err != nil {
			return fmt.Errorf("%v: %w", e, err)
		}
		// cu.Function is the handle and nothing else, but does not show it.
		l.functions[e] = *(*C.CUfunction)(unsafe.Pointer(&f))
	}
	return nil
}

// Unload frees the kernels. Nothing may run them any more.
func (l *Loaded) Unload() error {
	var errs []error
	for _, m := range l.modules {
		errs = append(errs, m.Unload())
	}
	l.modules, l.functions = nil, nil
	return errors.Join(errs...)
}

// On returns the kernels on a stream. They are called on threads whose current
// context is the one they were loaded into.
func (l *Loaded) On(s cu.Stream) Kernels {
	return New(stream{l.functions, C.CUstream(unsafe.Pointer(s.C()))})
}

type stream struct {
	functions map[Entry]C.CUfunction
	handle    C.CUstream
}

func (s stream) Launch(c Call) error {
	f, ok := s.functions[c.Entry]
	if !ok {
		return fmt.Errorf("no kernel %v is loaded", c.Entry)
	}
	params := c.Params()
	code := C.euryale_launch(f, C.uint(c.Grid.X), C.uint(c.Grid.Y), C.uint(c.Block.X), C.uint(c.Block.Y), s.handle,
		unsafe.Pointer(unsafe.SliceData(params)), C.size_t(8*len(params)))
	if code != C.CUDA_SUCCESS {
		return fmt.Errorf("launch of %v: %s", c.Entry, describe(code))
	}
	return nil
}

// describe returns the driver's words for a result.
func describe(code C.CUresult) string {
	var text *C.char
	if C.cuGetErrorString(code, &text) != C.CUDA_SUCCESS || text == nil {
		return fmt.Sprintf("CUDA error %d", code)
	}
	return fmt.Sprintf("%s (CUDA error %d)", C.GoString(text), code)
}
