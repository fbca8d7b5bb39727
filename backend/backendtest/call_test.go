package backendtest_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// spoiling is a communicator that changes a bit of each result.
type spoiling struct{ backend.Communicator }

func (s spoiling) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	w, err := s.Communicator.Start(q, what, dst, src)
	if err == nil {
		dst.Bytes()[0] ^= 1
	}
	return w, err
}

func TestCallComparesTheResult(t *testing.T) {
	var comms []backend.Communicator
	for _, c := range reference.New("test", 3, time.Minute) {
		comms = append(comms, c)
	}
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		for i, what := range []backend.Collective{
			{Kind: backend.AllReduce, Op: backend.Prod}, {Kind: backend.Gather, Root: 2},
			{Kind: backend.Scatter, Root: 1, Splits: []int{3, 0, 2}},
			{Kind: backend.AllToAll, Splits: []int{1, 2, 3, 0, 1, 0, 4, 4, 4}},
		} {
			testranks.NoError(backendtest.Call(c, nil, what, backend.BF16, 5, uint64(i)))
		}
		var wrong *backendtest.WrongError
		if err := backendtest.Call(spoiling{c}, nil, backend.Collective{Kind: backend.AllGather},
			backend.F64, 5, 9); !errors.As(err, &wrong) {
			return fmt.Errorf("a spoiled result: %v", err)
		}
		return nil
	})
}
