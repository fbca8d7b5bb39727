package spinwait

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestPatienceIsNotSpentWhileTheProcessDoesNotRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := Patient(250 * time.Millisecond)
		time.Sleep(time.Hour)
		require.Check(t, !p.Over(), "one long pause used up 250 ms")
		looks := 1
		for ; !p.Over(); looks++ {
			time.Sleep(time.Millisecond)
		}
		require.Check(t, looks >= 200 && looks <= 250, "250 ms are used up after %d calls 1 ms "+
			"apart, want 246", looks)
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
		err := context.Cause(short)
		require.Check(t, errors.Is(err, context.DeadlineExceeded), "after its time: %v", err)
		if err := long.Err(); err != nil {
			t.Errorf("before its time: %v", err)
		}
		end()
		<-long.Done()
	})
}
