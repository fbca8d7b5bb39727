package autograd

import (
	"errors"
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestErrorsNameRankAndBucketOnce, however many functions they come through.
func TestErrorsNameRankAndBucketOnce(t *testing.T) {
	comm := reference.New("job", 2, 0)[1]
	cause := errors.New("the device is lost: no more memory")
	err := fmt.Errorf("bucket 0 (b): %w", named(comm, fmt.Errorf("bucket 0 (b): %w", cause)))
	err = onRank(comm, "save to there", named(comm, err))
	require.Equal(t, "the error", err.Error(), "autograd: rank 1 of job: save to there: "+
		"bucket 0 (b): the device is lost: no more memory")
	require.Check(t, errors.Is(err, cause), "%v has lost its cause", err)
	twice := named(comm, errors.New("rank 0 has 3: rank 1 has 3: 3: 3"))
	require.Equal(t, "the error", twice.Error(), "autograd: rank 1 of job: rank 0 has 3: "+
		"rank 1 has 3: 3: 3")
}
