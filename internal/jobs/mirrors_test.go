package jobs_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// everything is what ranks shard in stage 3 of ZeRO.
const everything = vm.SolverState | vm.Gradients | vm.Parameters

// shardedWays are trainings of which ranks shard the solver's state, or everything.
var shardedWays = []elasticWay{
	{shards: vm.SolverState}, {shards: vm.SolverState | vm.Gradients, guarded: true},
	{shards: everything}, {shards: everything, guarded: true},
	{shards: vm.SolverState, normed: true}, {shards: vm.SolverState, guarded: true, tiled: true},
	{shards: everything, normed: true}, {shards: everything, guarded: true, tiled: true},
}

// whole is the way without shards.
func (w elasticWay) whole() elasticWay { w.shards = 0; return w }

// mortal is a job whose process dies in a call, once others have died before it and the training
// has gone on.
type mortal struct {
	*session.Elastic
	deaths *deaths
	number int
	at     int // a call since then
	calls  int
}

// deaths counts those that have died, and those after whose death the others have done steps.
type deaths struct {
	dead, over atomic.Int32
	mu         sync.Mutex
	steps      map[elastic.ID]int // of each process since the last death
}

func (m *mortal) Next(ctx context.Context, leave func(elastic.View) error) (backend.Communicator,
	elastic.View, error) {
	comm, view, err := m.Elastic.Next(ctx, leave)
	return &mortalComm{comm, m}, view, err
}

type mortalComm struct {
	backend.Communicator
	job *mortal
}

func (m *mortalComm) Start(q backend.Queue, c backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if j := m.job; int(j.deaths.over.Load()) >= j.number {
		if j.calls++; j.calls-1 == j.at {
			j.deaths.mu.Lock()
			defer j.deaths.mu.Unlock()
			j.deaths.dead.Add(1)
			clear(j.deaths.steps)
			panic(errKilled)
		}
	}
	return m.Communicator.Start(q, c, dst, src)
}

func (m *mortalComm) Split(color, key int) (backend.Communicator, error) {
	comm, err := m.Communicator.Split(color, key)
	return &mortalComm{comm, m.job}, err
}

// stepped counts a step of a process. The second one after a death is of the ranks without it.
func (d *deaths) stepped(id elastic.ID, _ *elasticModel, _ *autograd.Elastic) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.steps[id]++; d.steps[id] == 2 {
		d.over.Store(d.dead.Load())
	}
	return nil
}

// TestAShardSurvivesTheDeathOfARankInAnyCall: one after the other dies, each in a call that is
// drawn, and is replaced or not, with drawn numbers of ranks and stages of ZeRO.
func TestAShardSurvivesTheDeathOfARankInAnyCall(t *testing.T) {
	const steps = 16
	seeds := 30
	if os.Getenv("EURYALE_FULL") != "" {
		seeds = 600
	}
	want, died := map[elasticWay]string{}, 0
	for seed := range seeds {
		random := rand.New(rand.NewPCG(62, uint64(seed)))
		way := shardedWays[random.IntN(len(shardedWays))]
		if _, known := want[way.whole()]; !known {
			want[way.whole()] = elasticAlone(t, steps, way.whole())
		}
		n, comes := 4+random.IntN(4), random.IntN(3)
		d := &deaths{steps: map[elastic.ID]int{}}
		victims := random.Perm(n)[:1+random.IntN(3)]
		r := newElasticRun(t, "mortal", n, steps, elastic.Limits{Least: 1, Most: n}, nobody,
			way.of, func(r *elasticRun) {
				r.after = d.stepped
				calls := random.Perm(50)
				r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
					number := slices.Index(victims, int(id)-1)
					if number < 0 {
						return job
					}
					at := calls[number]
					if way.guarded { // in vm.New nobody frees the device's memory
						at += 15
					}
					return &mortal{job, d, number, at, 0}
				}
			})
		var first []elastic.ID
		for i := range n {
			first = append(first, elastic.ID(i+1))
		}
		for i := range comes {
			r.start(elastic.ID(n+1+i), elastic.First(first...), never)
		}
		r.running.Wait()
		died += int(d.dead.Load())
		for i, err := range r.errs {
			require.Check(t, err == nil && r.hashes[i] == want[way.whole()] ||
				errors.Is(err, autograd.ErrFinished), "seed %d, %+v, %d ranks, of which %v die, "+
				"and %d come: %v, or other parameters", seed, way, n, victims, comes, err)
		}
	}
	require.Check(t, died > seeds, "only %d ranks have died", died)
}

// TestRanksKeepShardsWithACopyOfEach: whose size is said, of the solver's state or of everything.
func TestRanksKeepShardsWithACopyOfEach(t *testing.T) {
	const steps = 4
	want := elasticAlone(t, steps, planned)
	for _, is := range []struct {
		n    int
		way  elasticWay
		part string
	}{
		{2, shardedWays[0], "720 of 720"}, {3, shardedWays[0], "720 of 720"},
		{4, shardedWays[0], "384 of 720"}, {6, shardedWays[0], "256 of 720"},
		{3, shardedWays[2], "1080 of 1080"}, {4, shardedWays[2], "576 of 1080"},
		{6, shardedWays[3], "384 of 1080"},
	} {
		n, said := is.n, ""
		r := newElasticRun(t, "parts", n, steps, elastic.Limits{Least: 1, Most: n}, nobody,
			is.way.of, func(r *elasticRun) {
				r.after = func(id elastic.ID, m *elasticModel, e *autograd.Elastic) error {
					if id == 1 {
						said = m.said
					}
					return nil
				}
			})
		require.Check(t, r.end() == want, "%d ranks: other parameters than one", n)
		says := fmt.Sprintf("a rank of %d keeps %s bytes", n, is.part)
		require.Check(t, strings.Count(said, says) == 1, "%d ranks say %q", n, said)
	}
}

// TestWhatTheHostWritesBetweenStepsCounts: on a device, where each rank has its part beside the
// whole.
func TestWhatTheHostWritesBetweenStepsCounts(t *testing.T) {
	const steps = 5
	run := func(n int, way elasticWay) string {
		return newElasticRun(t, "writes", n, steps, elastic.Limits{Least: 1, Most: n}, nobody,
			way.of, func(r *elasticRun) {
				r.after = func(_ elastic.ID, m *elasticModel, e *autograd.Elastic) error {
					if e.Next() != 2 {
						return nil
					}
					err := m.machine.Pull(m.w1)
					w := m.w1.Value().Data().([]float32)
					for i := range w {
						w[i] /= 2
					}
					return err
				}
			}).end()
	}
	want := run(1, planned)
	for _, way := range shardedWays[:4] {
		require.Check(t, run(4, way) == want, "%+v: other parameters than one rank", way)
	}
}

// TestTheLossOfAllRanksWithAPartEndsTheTraining: by an error that names them.
func TestTheLossOfAllRanksWithAPartEndsTheTraining(t *testing.T) {
	for _, way := range shardedWays[:4] {
		r := newElasticRun(t, "both", 4, 6, elastic.Limits{Least: 1, Most: 4},
			func(id elastic.ID) func(step, micro int) bool {
				return func(step, _ int) bool { return id%2 == 1 && step == 3 }
			}, way.of)
		r.running.Wait()
		require.Equal(t, "errors", len(r.errs), 2)
		for _, err := range r.errs {
			require.Fails(t, "the training", err, "processes 0 and 2", "newest checkpoint")
		}
	}
}

// TestTheLossOfAllRanksWithAPartIsNeverUnnoticed: whatever is under way, also where another one has
// left.
func TestTheLossOfAllRanksWithAPartIsNeverUnnoticed(t *testing.T) {
	const steps, calls = 3, 47
	stride := 3
	if os.Getenv("EURYALE_FULL") != "" {
		stride = 1
	}
	want := elasticAlone(t, steps, planned)
	lost := 0
	for call := calls % stride; call < calls; call += stride {
		d := &deaths{steps: map[elastic.ID]int{}}
		n := 4 + call%2
		r := newElasticRun(t, "both", n, steps, elastic.Limits{Least: 1, Most: n}, nobody,
			shardedWays[call/stride%2*2].of, func(r *elasticRun) {
				r.early = map[int]elastic.ID{5: 5}[n]
				r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
					if id%2 == 0 || id == 5 {
						return job
					}
					return &mortal{job, d, 0, call, 0}
				}
			})
		r.running.Wait()
		for i, err := range r.errs {
			switch {
			case err != nil && strings.Contains(err.Error(), "a shard is lost with"):
				lost++
			default:
				require.Check(t, err == nil && (r.hashes[i] == want ||
					r.hashes[i] == "early"), "call %d: %v, or other parameters", call, err)
			}
		}
	}
	require.Check(t, lost >= 8, "a part is lost on %d ranks only", lost)
}

// TestARankMayBeCutOffWhereTheOthersHaveDoneTheLastStep: they leave, with what they have of the
// state.
func TestARankMayBeCutOffWhereTheOthersHaveDoneTheLastStep(t *testing.T) {
	const steps = 3
	for _, way := range shardedWays[:4] {
		want := elasticAlone(t, steps, way.whole())
		calls := 0
		cutOff(t, way, steps, want, false, func(n int) bool { calls = n + 1; return false }, "none")
		for call := calls - 6; call < calls; call++ {
			for _, unnoticed := range []bool{false, true} {
				cutOff(t, way, steps, want, unnoticed, func(n int) bool { return n == call },
					fmt.Sprintf("call %d of %d", call, calls))
			}
		}
	}
}

// TestAShardGoesOnWhereAllRanksThatHaveItRetire: one of them stays until another one has it.
func TestAShardGoesOnWhereAllRanksThatHaveItRetire(t *testing.T) {
	for _, way := range shardedWays[:4] {
		retire(t, way)
	}
}

func retire(t *testing.T, way elasticWay) {
	const steps = 8
	told := errors.New("told to end")
	want := elasticAlone(t, steps, planned)
	var last atomic.Int32
	r := newElasticRun(t, "retire", 5, steps, elastic.Limits{Least: 1, Most: 5}, nobody,
		way.of, func(r *elasticRun) {
			r.after = func(id elastic.ID, _ *elasticModel, e *autograd.Elastic) error {
				if id < 5 && e.Next() == 2 {
					e.Retire(told)
				}
				if id == 5 {
					last.Store(int32(e.Size()))
				}
				return nil
			}
		})
	r.running.Wait()
	ended := 0
	for i, err := range r.errs {
		if errors.Is(err, told) {
			ended++
		} else {
			require.Check(t, err == nil && r.hashes[i] == want,
				"%v, or other parameters", err)
		}
	}
	require.Check(t, ended == 4 && len(r.errs) == 5 && last.Load() == 1,
		"%d of %d have retired, and the last step has %d ranks", ended, len(r.errs), last.Load())
}

// TestShardsOfElasticTrainingsAreInCheckpoints: which other numbers of ranks load, with shards and
// without.
func TestShardsOfElasticTrainingsAreInCheckpoints(t *testing.T) {
	const before, steps = 3, 6
	for i, way := range shardedWays {
		want := elasticAlone(t, steps, way.whole())
		dir := t.TempDir()
		newElasticRun(t, "saves", 4, before, elastic.Limits{Least: 1, Most: 4}, nobody, way.of,
			func(r *elasticRun) { r.after = saves(dir, i%2 > 0, before) }).end()
		for n, way := range map[int]elasticWay{1: way, 2: way.whole(), 4: way, 7: way} {
			r := newElasticRun(t, "resumes", n, steps, elastic.Limits{Least: 1, Most: n},
				func(id elastic.ID) func(step, micro int) bool {
					return func(step, micro int) bool { return n == 7 && id == 2 && step == before }
				}, way.of, func(r *elasticRun) { r.from = dir })
			require.Check(t, r.end() == want, "%d ranks, %+v: other parameters", n, way)
		}
	}
}
