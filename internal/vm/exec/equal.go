package exec

import (
	"bytes"
	"runtime"
	"sync"
	"sync/atomic"
)

// comparedAtOnce is how many bytes one goroutine compares: 10 us or more, which is worth starting
// it.
const comparedAtOnce = 256 << 10

// equal is bytes.Equal, by several goroutines for batches of some MiB: a device waits meanwhile.
func equal(a, b []byte) bool {
	n := min(len(a)/comparedAtOnce, runtime.GOMAXPROCS(0))
	if len(a) != len(b) || n < 2 {
		return bytes.Equal(a, b)
	}
	var differ atomic.Bool
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			if first, end := len(a)*i/n, len(a)*(i+1)/n; !bytes.Equal(a[first:end], b[first:end]) {
				differ.Store(true)
			}
		})
	}
	all.Wait()
	return !differ.Load()
}
