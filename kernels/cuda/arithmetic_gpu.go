//go:build gpu

package cuda

/*
#include <cuda.h>

// Makes the driver load a function now, where it may have put that off.
static CUresult euryale_load_function(CUfunction f)
{
	int registers;
	CUresult result = cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, f);
#if CUDA_VERSION >= 12040
	// A driver that does not have this call loads functions as they are looked up.
	if (result == CUDA_SUCCESS)
		cuFuncLoad(f);
#endif
	return result;
}
*/
import "C"

import "fmt"

// Warm makes the driver load every kernel onto the device. It would do so at the
// first launch otherwise, and wait for what runs on the device: a deadlock if
// that waits for another rank.
func (l *Loaded) Warm() error {
	for e, f := range l.functions {
		if code := C.euryale_load_function(f.handle); code != C.CUDA_SUCCESS {
			return fmt.Errorf("load kernel %v: %s", e, describe(code))
		}
	}
	return nil
}
