package spinwait

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestPatienceIsNotSpentWhileTheProcessDoesNotRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := Patient(250 * time.Millisecond)
		time.Sleep(time.Hour)
		if p.Over() {
			t.Error("one long pause used up 250 ms")
		}
		looks := 1
		for ; !p.Over(); looks++ {
			time.Sleep(time.Millisecond)
		}
		if looks < 200 || looks > 250 {
			t.Errorf("250 ms are used up after %d calls 1 ms apart, want 246", looks)
		}
	})
}

func TestWithPatienceEndsByItselfOrWithItsParent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		parent, end := context.WithCancel(t.Context())
		short, cancel := WithPatience(parent, 100*time.Millisecond)
		defer cancel()
		long, cancelLong := WithPatience(parent, time.Hour)
		defer cancelLong()
		time.Sleep(time.Second)
		if err := context.Cause(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after its time: %v", err)
		}
		if err := long.Err(); err != nil {
			t.Errorf("before its time: %v", err)
		}
		end()
		<-long.Done()
	})
}
