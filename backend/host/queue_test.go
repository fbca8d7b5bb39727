package host

import (
	"errors"
	"math"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

func TestFoundAllocOfMoreThanTheMachineHasPanics(t *testing.T) {
	for _, nbytes := range []int{1 << 50, math.MaxInt, -1} {
		if _, err := (Device{}).Alloc(nbytes); !errors.Is(err, backend.ErrArgument) {
			t.Errorf("%d bytes: %v", nbytes, err)
		}
	}
}
