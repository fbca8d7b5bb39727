//go:build !linux

package spinwait

import (
	"runtime"
	"time"
)

// Yield lets other goroutines run.
func Yield() { runtime.Gosched() }

func sleep(d time.Duration) { time.Sleep(d) }
