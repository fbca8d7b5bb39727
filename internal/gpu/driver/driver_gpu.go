//go:build gpu

package driver

/*
#include <stddef.h>
#include <cuda.h>

// From our libcuda.a; weak, because a program may be linked against another one.
extern int euryale_cuda_status(const char **why) __attribute__((weak));

static int status(const char **why)
{
	int result;
	if (euryale_cuda_status)
		return euryale_cuda_status(why);
	result = cuInit(0);
	*why = NULL;
	cuGetErrorString(result, why);
	return result;
}
*/
import "C"

import "fmt"

func status() error {
	var why *C.char
	switch code := C.status(&why); {
	case code == C.CUDA_SUCCESS:
		return nil
	case why == nil:
		return fmt.Errorf("CUDA driver does not start: error %d", code)
	default:
		return fmt.Errorf("CUDA driver does not start: %s (error %d)", C.GoString(why), code)
	}
}
