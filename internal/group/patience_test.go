package group_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/euryale-ml/euryale/internal/group"
)

func TestPatienceIsNotSpentWhileTheProcessDoesNotRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := group.Patient(250 * time.Millisecond)
		time.Sleep(time.Hour)
		if p.Over() {
			t.Error("it is over after one long pause")
		}
		looks := 1
		for ; !p.Over(); looks++ {
			time.Sleep(time.Millisecond)
		}
		if looks < 200 || looks > 250 {
			t.Errorf("it is over after %d looks at intervals of 1 ms, want 245", looks)
		}
	})
}
