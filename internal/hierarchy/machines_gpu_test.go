//go:build gpu

package hierarchy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/rendezvous"
)

// The ranks of this file are processes on several machines, as far as NCCL knows: each
// names its own (NCCL_HOSTID). Between machines NCCL goes over sockets, inside over NVLink,
// and ranks of different machines may share a GPU: four ranks take two. Where there is one GPU,
// each rank is a separate machine for NCCL, and the layout is declared.

func TestMain(m *testing.M) { proctest.Main(m, rankOf) }

// machineRank is a rank of such a job.
type machineRank struct {
	world  *rendezvous.World
	layout Layout
	device *cuda.Device
}

// rankOf is a process of a scenario, whose name is a layout, a verb and what it needs.
func rankOf(scenario string) error {
	words := strings.Fields(scenario)
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return err
	}
	world, err := rendezvous.Join(context.Background(), env)
	if err != nil {
		return err
	}
	defer world.Close()
	layout, err := Parse(words[0], world.Size)
	if err != nil {
		return err
	}
	r := &machineRank{world: world, layout: layout}
	if r.device, err = r.open(); err != nil {
		return err
	}
	switch words[1] {
	case "calls":
		err = r.calls()
	case "buckets":
		err = r.buckets()
	case "aborts":
		err = r.aborts(words[2])
	case "dies":
		err = r.dies()
	}
	return errors.Join(err, r.device.Close())
}

// open opens the rank's device: no two ranks of what is a machine for NCCL have the same.
func (r *machineRank) open() (*cuda.Device, error) {
	machine, place := r.layout.Place(r.world.Rank)
	ordinal, name := machine*r.layout.Devices()+place, fmt.Sprintf("machine %d", machine)
	d, err := cuda.Open(ordinal)
	if errors.Is(err, backend.ErrArgument) {
		d, err = cuda.Open(ordinal % 2)
	}
	if errors.Is(err, backend.ErrArgument) { // there is one
		name = fmt.Sprintf("rank %d", r.world.Rank)
		d, err = cuda.Open(0)
	}
	return d, errors.Join(err, os.Setenv("NCCL_HOSTID", name))
}

// connect returns a communicator that the job's end closes.
func (r *machineRank) connect(o Options, wrap func(backend.Communicator) backend.Communicator) (
	*Communicator, error) {
	flat := gpu.New(func(int) (gpu.Device, error) { return r.device, nil })
	c, err := layeredBackend{flat, r.layout, o, wrap}.Connect(context.Background(), r.world)
	if err != nil {
		return nil, err
	}
	return c.(*Communicator), nil
}

func (r *machineRank) calls() error {
	memory, err := r.device.Alloc(8 * r.world.Size * longest)
	if err != nil {
		return err
	}
	c, err := r.connect(always(), group.Compared)
	if err != nil {
		return err
	}
	if err := everyCallEqualsFlat(c, memory, longest); err != nil {
		return err
	}
	fmt.Println("equal")
	return errors.Join(c.Close(), r.device.Free(memory))
}

// bucketsTook is what rank 0 says of an operation.
type bucketsTook struct {
	InFlight     int
	Hierarchical time.Duration
	Flat         time.Duration
	linkUse
}

func (r *machineRank) buckets() error {
	x, err := bucketsOn(r.device)
	if err != nil {
		return err
	}
	if x.c, err = r.connect(Options{Mode: Always, Spans: 1 << 12}, group.Compared); err != nil {
		return err
	}
	if err := x.fill(); err != nil {
		return err
	}
	for _, inFlight := range []int{1, 4} {
		took := bucketsTook{InFlight: inFlight}
		if took.Flat, err = x.timed(x.c.Communicator, inFlight); err != nil {
			return err
		}
		if took.Hierarchical, err = x.timed(x.c, inFlight); err != nil {
			return err
		}
		took.linkUse = linksIn(x.lastSpans())
		text, err := json.Marshal(took)
		if err != nil {
			return err
		}
		fmt.Println(string(text))
	}
	return errors.Join(x.c.Close(), x.close())
}

// timed returns the least time of three operations, whose results are right.
func (x *bucketRank) timed(comm backend.Communicator, inFlight int) (least time.Duration,
	err error) {
	if err := x.warm(comm, inFlight); err != nil {
		return 0, err
	}
	for i := range 3 {
		began := time.Now()
		if err := errors.Join(x.reduce(comm, inFlight), backend.Barrier(comm)); err != nil {
			return 0, err
		}
		if took := time.Since(began); i == 0 || took < least {
			least = took
		}
	}
	return least, x.verify()
}

func (r *machineRank) aborts(name string) error {
	number, err := strconv.Atoi(name)
	if err != nil {
		return err
	}
	memory, err := r.device.Alloc(8 * r.world.Size * longest)
	if err != nil {
		return err
	}
	// Ranks that share a GPU take turns of milliseconds.
	d := desertion{layout: r.layout, what: allReduce, phase: phase(number),
		from: number % r.world.Size, after: time.Second}
	c, err := r.connect(ofSlices(), probes(r.layout, d.hook))
	if err != nil {
		return err
	}
	waited, err := d.wait(c, memory, func() { fmt.Println("aborts", time.Now().UnixNano()) })
	if err != nil {
		return err
	}
	fmt.Println("awake", time.Now().UnixNano(), waited)
	if err := usable(c, memory); err != nil {
		return err
	}
	fmt.Println("usable")
	return errors.Join(c.Close(), r.device.Free(memory))
}

// dies ends the last rank inside a call.
func (r *machineRank) dies() error {
	memory, err := r.device.Alloc(8 * r.world.Size * longest)
	if err != nil {
		return err
	}
	c, err := r.connect(always(), group.Compared)
	if err != nil {
		return err
	}
	if err := equalsFlatOnDevice(c, memory, allReduce, backend.F32, longest); err != nil {
		return err
	}
	x := memory.As(backend.F32).Slice(0, longest)
	for i := 0; ; i++ {
		if i == 10 && c.Rank() == c.Size()-1 {
			fmt.Println("dies", time.Now().UnixNano())
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		if err := backend.Run(c, allReduce, x, x); err != nil {
			fmt.Println("awake", time.Now().UnixNano(), strings.ReplaceAll(err.Error(), "\n", " "))
			break
		}
	}
	if err := usable(c, memory); err != nil {
		return err
	}
	fmt.Println("usable")
	return nil // closing takes peers
}

// machineLayouts are those that four ranks can stand for.
func machineLayouts(t *testing.T) []Layout {
	t.Helper()
	if err := gpu.New(nil).Available(); err != nil {
		testenv.Lacking(t, err.Error())
	}
	return []Layout{Grid(2, 2), gridOf(2, 2, machineMinor), Grid(4, 1)}
}

// startMachines starts the ranks of a scenario.
func startMachines(t *testing.T, l Layout, scenario string) []proctest.Rank {
	t.Helper()
	return proctest.Start(t, l.String()+" "+scenario, l.Size())
}

func TestMachinesEqualFlatCallsOnGPU(t *testing.T) {
	for _, l := range machineLayouts(t) {
		t.Run(l.String(), func(t *testing.T) {
			for r, p := range startMachines(t, l, "calls") {
				said := p.Next()
				require.Check(t, said == "equal", "rank %d: %s", r, said)
			}
		})
	}
}

func TestMachinesOverlapBucketsOnGPU(t *testing.T) {
	needGPUs(t) // on one, processes take turns
	l := machineLayouts(t)[0]
	ranks := startMachines(t, l, "buckets")
	for r, p := range ranks {
		var took [2]bucketsTook
		for i := range took {
			said := p.Next()
			err := json.Unmarshal([]byte(said), &took[i])
			require.That(t, err == nil, "rank %d: %s", r, said)
			t.Logf("rank %d: %s", r, said)
		}
		one, four := took[0], took[1]
		require.Check(t, one.Overlaps < four.Overlaps && four.Overlaps >= bucketCount &&
			one.Both < four.Both, "rank %d: phases of buckets overlap %d times with one in "+
			"flight and %d with four", r, one.Overlaps, four.Overlaps)
	}
}

func TestMachinesAbortInEveryPhaseOnGPU(t *testing.T) {
	l := machineLayouts(t)[0]
	for _, phase := range communicating {
		t.Run(phase.String(), func(t *testing.T) {
			ranks := startMachines(t, l, fmt.Sprintf("aborts %d", phase))
			from := int(phase) % l.Size()
			aborted, _ := moment(t, ranks[from].Next(), "aborts")
			waiting := 0
			for r, p := range ranks {
				awake, waited := moment(t, p.Next(), "awake")
				if took := awake.Sub(aborted); took > proctest.Within(time.Second) {
					t.Errorf("rank %d was awake after %v", r, took)
				}
				if waited == "true" {
					waiting++
				}
				p.Says(t, "usable")
			}
			require.Check(t, waiting != 0, "nobody was waiting")
		})
	}
}

func TestMachinesNameADeadRankOnGPU(t *testing.T) {
	l := machineLayouts(t)[0]
	ranks := startMachines(t, l, "dies")
	died, _ := moment(t, ranks[3].Next(), "dies")
	for r, p := range ranks[:3] {
		awake, why := moment(t, p.Next(), "awake")
		if took := awake.Sub(died); took > proctest.Within(2*time.Second) {
			t.Errorf("rank %d was awake after %v", r, took)
		}
		require.Check(t, strings.Contains(why, "rank 3 is down"), "rank %d: %s", r, why)
		p.Says(t, "usable")
	}
}

// moment reads "what nanoseconds rest".
func moment(t *testing.T, line, what string) (at time.Time, rest string) {
	t.Helper()
	words := strings.SplitN(line, " ", 3)
	require.That(t, len(words) >= 2 && words[0] == what, "it says %q, want %q and when", line, what)
	ns := require.Value(strconv.ParseInt(words[1], 10, 64))(t)
	if len(words) == 3 {
		rest = words[2]
	}
	return time.Unix(0, ns), rest
}
