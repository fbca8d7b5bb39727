package group

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// A rank that has closed may have done so because of an end that is on its way here: then that is
// why nobody waits any more.
func TestWaitEndsWithWhatARankHasClosedFor(t *testing.T) {
	closed, aborted := backend.ErrClosed, errors.New("rank 1 has aborted")
	for name, test := range map[string]struct {
		says []error // of rank 2, look by look; the last one stays
		want error
	}{
		"closed, and the abort follows": {[]error{closed, closed, aborted}, aborted},
		"closed":                        {[]error{closed}, closed},
		"aborted":                       {[]error{aborted}, aborted},
	} {
		look, began := 0, time.Now()
		ctx, over := attended(t.Context(), func(r int) error {
			if r != 2 {
				return nil
			}
			look++
			return test.says[min(look, len(test.says))-1]
		}, 0, 3)
		<-ctx.Done()
		require.Equal(t, fmt.Sprintf("%s: the wait ends", name), context.Cause(ctx), test.want)
		if took := time.Since(began); test.want == closed && took < ReportGrace {
			t.Errorf("%s: the wait ends after %v", name, took)
		}
		over()
	}
}
