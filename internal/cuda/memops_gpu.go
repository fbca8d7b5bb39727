//go:build gpu

package cuda

/*
#include <cuda.h>

enum { euryale_most_words = 64 };

// Waits for each word to be 1, without a kernel, and sets all to 0.
static CUresult euryale_await(uintptr_t stream, const uint64_t *words, unsigned n)
{
	CUstreamBatchMemOpParams ops[2 * euryale_most_words] = {0};
	unsigned i;

	for (i = 0; i < n; i++) {
		ops[i].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
		ops[i].waitValue.address = words[i];
		ops[i].waitValue.value = 1;
		ops[i].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
		ops[n + i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
		ops[n + i].writeValue.address = words[i];
		ops[n + i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
	}
	return cuStreamBatchMemOp((CUstream)stream, 2 * n, ops, 0);
}

// Sets n words that follow each other.
static CUresult euryale_set(uintptr_t stream, uint64_t words, unsigned n, uint32_t value)
{
	CUstreamBatchMemOpParams ops[euryale_most_words] = {0};
	unsigned i;

	for (i = 0; i < n; i++) {
		ops[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
		ops[i].writeValue.address = words + 4 * i;
		ops[i].writeValue.value = value;
		ops[i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
	}
	return cuStreamBatchMemOp((CUstream)stream, n, ops, 0);
}
*/
import "C"

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Await waits until each of some words of the device's memory, of 32 bits, is 1, and sets them to
// 0. No kernel does, so that it takes no multiprocessor, and nothing ends the wait but the words.
func (q *Queue) Await(words ...backend.Buffer) error {
	at := make([]C.uint64_t, len(words))
	for i, w := range words {
		if !w.Device() || w.NBytes() != 4 || len(words) > C.euryale_most_words {
			return fmt.Errorf("%w: a wait for word %d of %d, of %d bytes: it takes %d of a "+
				"device at most, of 4", backend.ErrArgument, i, len(words), w.NBytes(),
				C.euryale_most_words)
		}
		at[i] = C.uint64_t(w.Addr())
	}
	if len(words) == 0 {
		return nil
	}
	if err := q.usable(); err != nil {
		return err
	}
	defer q.launcher.Separate()
	return q.device.on("wait for memory", func() error {
		return result(C.euryale_await(C.uintptr_t(q.Stream()), &at[0], C.uint(len(at))))
	})
}

// Set sets words of the device's memory, of 32 bits, to a value, in the order of the queue. On a
// queue on which nothing else is it ends the waits of other queues: copies from the host's memory
// do not, which on an H100 wait for graphs in which there are waits.
func (q *Queue) Set(words backend.Buffer, value uint32) error {
	n := words.NBytes() / 4
	if !words.Device() || words.NBytes()%4 != 0 || n == 0 || n > C.euryale_most_words {
		return q.device.named("set", fmt.Errorf("%w: %d bytes: it takes %d words of 32 bits of a "+
			"device at most", backend.ErrArgument, words.NBytes(), C.euryale_most_words))
	}
	if err := q.usable(); err != nil {
		return err
	}
	return q.device.on("set memory", func() error {
		return result(C.euryale_set(C.uintptr_t(q.Stream()), C.uint64_t(words.Addr()), C.uint(n),
			C.uint32_t(value)))
	})
}
