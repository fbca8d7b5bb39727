//go:build unix

package fault

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// The processes of these tests are jobs of one rank, to which the fault happens
// that the scenario names.
func TestMain(m *testing.M) {
	proctest.Main(m, func(scenario string) error {
		plan, err := Parse(scenario)
		if err != nil {
			return err
		}
		comm := New(reference.New("alone", 1, time.Minute)[0], plan)
		for i := range 3 {
			if err := call(comm); err != nil {
				return err
			}
			fmt.Println("call", i+1)
		}
		return nil
	})
}

// call makes one collective.
func call(comm backend.Communicator) error {
	x := backend.Of([]float32{1})
	return backend.Run(comm, backend.Collective{Kind: backend.AllReduce}, x, x)
}

// group returns size ranks to which plan happens.
func group(size int, timeout time.Duration, plan Plan) *backendtest.Group {
	plain := reference.New("test", size, timeout)
	g := &backendtest.Group{Fail: plain[0].Lose}
	for _, c := range plain {
		g.Comms = append(g.Comms, New(c, plan))
	}
	return g
}

func TestCommunicatorWithNoFaultDuePasses(t *testing.T) {
	backendtest.RunWrapper(t, backendtest.Options{
		Sizes: []int{1, 2, 4},
		New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
			return group(size, timeout, Plan{Kill, 0, 1 << 30}), nil
		},
	})
}

func TestAbortNamesTheRankToAllOthers(t *testing.T) {
	comms := group(3, time.Minute, Plan{Abort, 1, 4}).Comms
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		for i := range 3 {
			if err := call(c); err != nil {
				return fmt.Errorf("call %d, before the fault: %w", i+1, err)
			}
		}
		err := call(c)
		if !errors.Is(err, backend.ErrAborted) ||
			!strings.Contains(err.Error(), "abort,rank=1,call=4") {
			return fmt.Errorf("the call of the fault: %w", err)
		}
		if want := "because of rank 1"; c.Rank() != 1 && !strings.Contains(err.Error(), want) {
			return fmt.Errorf("%q is not in the error: %w", want, err)
		}
		return nil
	})
}

func TestCallsOnGroupsCount(t *testing.T) {
	comms := group(2, time.Minute, Plan{Panic, 0, 4}).Comms
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		part := testranks.Must(c.Split(0, 0))
		alone := testranks.Must(part.Split(c.Rank(), 0))
		for i, on := range []backend.Communicator{c, part, alone} {
			if err := call(on); err != nil {
				return fmt.Errorf("call %d: %w", i+1, err)
			}
		}
		if _, panicked := tryCall(alone); panicked != (c.Rank() == 0) {
			return fmt.Errorf("rank %d: the fourth call panics: %v", c.Rank(), panicked)
		}
		return nil
	})
}

// tryCall makes a call and reports whether it panicked.
func tryCall(c backend.Communicator) (err error, panicked bool) {
	defer func() { panicked = recover() != nil }()
	return call(c), false
}

func TestFaultHappensOnceWhateverTheGoroutine(t *testing.T) {
	c := New(reference.New("alone", 1, time.Minute)[0], Plan{Panic, 0, 50})
	var all sync.WaitGroup
	panics := make(chan bool, 100)
	for range cap(panics) {
		all.Go(func() {
			_, panicked := tryCall(c)
			panics <- panicked
		})
	}
	all.Wait()
	close(panics)
	n := 0
	for panicked := range panics {
		if panicked {
			n++
		}
	}
	require.Check(t, n == 1, "%d of 100 calls panicked, want 1", n)
}

func TestProcessEndsBeforeTheCallOfTheFault(t *testing.T) {
	for _, test := range []struct {
		kind Kind
		want func(syscall.WaitStatus) bool
	}{
		{Kill, func(s syscall.WaitStatus) bool {
			return s.Signaled() && s.Signal() == syscall.SIGKILL
		}},
		{Panic, func(s syscall.WaitStatus) bool { return s.ExitStatus() == 2 }},
		{Exit, func(s syscall.WaitStatus) bool { return s.ExitStatus() == ExitCode }},
	} {
		t.Run(test.kind.String(), func(t *testing.T) {
			p := proctest.Start(t, Plan{test.kind, 0, 3}.String(), 1)[0]
			p.Says(t, "call 1")
			p.Says(t, "call 2")
			require.Equal(t, "it still", p.End(), "")
			s := p.ProcessState.Sys().(syscall.WaitStatus)
			require.Check(t, test.want(s), "the process ended with %v", p.ProcessState)
		})
	}
}

func TestStoppedProcessGoesOnWhereItWasStopped(t *testing.T) {
	p := proctest.Start(t, Plan{Stop, 0, 3}.String(), 1)[0]
	p.Says(t, "call 1")
	p.Says(t, "call 2")
	var s syscall.WaitStatus
	_, err := syscall.Wait4(p.Process.Pid, &s, syscall.WUNTRACED, nil)
	require.That(t, err == nil && s.Stopped(), "the process is not stopped: %#x, %v", s, err)
	require.NoError(t, p.Process.Signal(syscall.SIGCONT))
	p.Says(t, "call 3")
	p.End()
	require.Check(t, p.ProcessState.Success(), "the process ended with %v", p.ProcessState)
}

func TestPlanIsWrittenAsItIsRead(t *testing.T) {
	for _, p := range []Plan{{Kill, 1, 400}, {Stop, 0, 1}, {Panic, 63, 2}, {Exit, 7, 7},
		{Abort, 0, 1 << 30}} {
		got, err := Parse(p.String())
		require.Check(t, got == p && err == nil, "%v is read as %v, %v", p, got, err)
	}
	if got, err := Parse("abort,call=3,rank=2"); got != (Plan{Abort, 2, 3}) || err != nil {
		t.Errorf("another order is read as %v, %v", got, err)
	}
}

func TestBadPlansAreRefusedInWords(t *testing.T) {
	for _, text := range []string{
		"", "kill", "kill,rank=1", "kill,call=1", "kill,rank=-1,call=1", "kill,rank=1,call=0",
		"kill,rank=one,call=1", "Kill,rank=1,call=1",
		"explode,rank=1,call=1", "kill,rank=1,call=1,", "kill,rank=1,call=1,rank=2",
		"kill,rank=1,call=1,size=2", ",rank=1,call=1", "rank=1,call=1",
	} {
		require.Fails(t, text, require.Err(Parse(text)), backend.ErrArgument,
			"kill,rank=1,call=400")
	}
	require.Fails(t, "a rank too many", (Plan{Kill, 2, 1}).Check(2), backend.ErrArgument,
		"no rank 2 among 2 ranks")
	for _, p := range []Plan{{}, {Kill, 0, 0}, {Kind(9), 0, 1}, {Kill, -1, 1}} {
		require.Fails(t, p, p.Check(2), backend.ErrArgument)
	}
	require.NoError(t, (Plan{Kill, 1, 1}).Check(2))
}
