// Command train measures training steps of package vm, beside PyTorch's of
// bench/peers/train_torch.py:
//
//	go run -tags gpu ./bench/train --models mlp,mlp-large --precisions f32,tf32 > plan.jsonl
//
// It trains each model on random data, with the solver in the plan, and writes one JSON line for
// each model and precision, with the keys of train_torch.py and the counts of the plan:
//
//	{"model":"mlp","precision":"f32","mode":"plan","ranks":1,"step_us":84.3,"loss":1.71,
//	 "peak_mib":3,"driver_mib":812,"fused":31,"arena_bytes":262144,"host_ops":0,
//	 "plan_mib":3}
//
// step_us is the median of --rounds rounds of --steps steps, on the slowest rank. peak_mib is the
// most memory that was in use on the device, and driver_mib what the driver says is in use at the
// end, context and libraries included: before_mib was in use before there was a machine. Both are
// rank 0's. --profile prints the ten steps of the plan that took longest when they ran one by one,
// and the ten operations. --layers and --batch replace those of each transformer.
//
// With -n 2 one rank first trains alone, then two train together in the same process, each with its
// own GPU and batch:
//
//	{"model":"mlp-large","precision":"tf32","mode":"plan","ranks":2,"step_us":...,
//	 "efficiency":0.93,"exposed_us":151.3,"buckets":[
//	 {"bucket":0,"mib":64,"products":5,"exposed_us":1.5},...]}
//
// efficiency is the time of a step of the rank alone by step_us. It is 1 if the exchange costs
// nothing; on the host the rank alone has the cores that the others share. With --alone=false there
// is none, and no such rank. buckets says of the
// exchange of each bucket of gradients how large it is, how many products the plan has beside it,
// and how long the steps waited for it. exposed_us is the sum of the waits.
//
// The waits are medians, of the rank that waited longest in all. Waits for a straggler
// count, too. They are measured in a few steps that run one by one after the others
// ([vm.Machine.Exposed]), since no time can be read inside the graph that a GPU records of a step.
// Copy engines run recorded exchanges only, so the exchanges of these few steps are all kernels.
//
// --memory 4.5 bounds the memory of each machine to 4.5 GiB (vm.WithMemory). plan_mib is what its
// plan takes, and extra its estimate of the time of rematerialized steps, as a share of all others.
// With --largest nothing is trained: it prints how many layers of width 2048 a GPT can have, on one
// rank and on two, or on -n ranks that shard what --shards says.
//
// --shards 1 shards the solver's state among the ranks, 2 the gradients, too, and 3 the learnables
// ([vm.WithShards]). Lines of several ranks have the planned bytes of each on rank 0.
// --wire bf16 sends gradients in 16 bits, and --wire topk=0.01 one of a hundred of them
// (autograd.WithCompression).
//
// --save-async DIR then writes checkpoints there, each followed by --save-every steps, and adds for
// how long the training waits for a SaveAsync, and for a Save.
//
// --observe lateness,trace,metrics measures what it costs a step to observe a training: a job that
// is observed takes turns with one that is not, and metrics are scraped once in a round. With -n 2
// there are exchanges in the steps, of which a GPU notes the times. ratio is
// the median of the ratios of rounds. With nothing, both are the same, and ratio shows the noise:
//
//	{"mode":"observe lateness,trace,metrics","model":"gpt2","off_us":33431.5,"precision":"bf16",
//	 "ratio":1.001,"rounds":40,"step_us":33465.1}
//
// --trouble gpu trains on two ranks, and then a second process keeps the GPU of rank 1 busy; with
// rank, rank 1 comes late by half a step, and with bucket the first bucket is exchanged 40 times.
// It prints the verdicts after each of the next five steps; the third line has named the trouble:
//
//	{"mode":"trouble bucket","model":"gpt2","precision":"bf16","step":3,"step_us":...,
//	 "before_us":...,"verdicts":["all ranks: bucket 0 takes 9.1 ms longer than it did, ..."]}
//
// On the host, --peer takes turns with another program, a round each, and writes the medians of
// both and of the ratios of rounds: with PyTorch, run by the Python that is named, or with
// Gorgonia's tape machine on the same graph, whose steps end with the same solver:
//
//	go run ./bench/train --device cpu --models mlp,nanogpt \
//		--peer bench/peers/train_torch.py --peer-mode compile --python python3
//	go run ./bench/train --device cpu --models convnet --peer gorgonia
//
//	{"model":"mlp","precision":"f32","mode":"plan","ranks":1,"step_us":101.2,...,
//	 "peer":"gorgonia","peer_us":1012.5,"ratio":0.1}
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/vm"
)

// warmUp is how many rounds are not counted. train_torch.py does as many.
const warmUp = 2

func main() {
	if err := run(os.Stdout, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "train:", err)
		os.Exit(1)
	}
}

// stages are what ranks shard in each stage of ZeRO.
var stages = []vm.Shards{0, vm.SolverState, vm.SolverState | vm.Gradients,
	vm.SolverState | vm.Gradients | vm.Parameters}

// options are the command line.
type options struct {
	models     []string
	precisions []vm.Precision // those of each model if empty
	device     string
	ranks      int
	rounds     int
	steps      int    // of a round
	shards     int    // the stage of ZeRO
	wire       string // what gradients travel in, "" for what they are
	profile    bool
	// another program to take turns with: "", gorgonia, or the path of train_torch.py
	peer      string
	python    string   // what runs that
	peerMode  string   // likewise how
	saveDir   string   // where checkpoints are written, "" for none
	saveEvery int      // steps
	memory    int      // bytes of each machine, 0 for no bound
	largest   bool     // only plan
	layers    int      // of transformers, 0 for the model's
	batch     int      // of transformers, 0 for the model's
	alone     bool     // whether one rank trains alone first
	watch     []string // what --observe turns on, nil without
	trouble   string   // what the training gets into, "" for none
	busy      bool     // it keeps a device busy, for another process in trouble
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("train", flag.ContinueOnError)
	list := f.String("models", strings.Join(names(), ","), "what to train")
	precisions := f.String("precisions", "", "some of f32, tf32, bf16; empty for those of "+
		"train_torch.py")
	f.StringVar(&o.device, "device", "gpu", "gpu or cpu")
	f.IntVar(&o.ranks, "n", 1, "ranks, each with a device and a batch of its own")
	f.IntVar(&o.rounds, "rounds", 15, "rounds of --steps steps")
	f.IntVar(&o.steps, "steps", 10, "steps of a round")
	f.IntVar(&o.shards, "shards", 0, "1 to shard the solver's state among the ranks, 2 the "+
		"gradients, too, 3 the learnables, too")
	f.StringVar(&o.wire, "wire", "", "how gradients travel: bf16, f16, topk=0.01 or "+
		"threshold=0.001; empty for f32")
	f.BoolVar(&o.profile, "profile", false, "print the slowest steps of each plan")
	f.StringVar(&o.peer, "peer", "", "what to take turns with on the host: gorgonia, or the path "+
		"of train_torch.py")
	f.StringVar(&o.peerMode, "peer-mode", "eager", "how train_torch.py runs: eager or compile")
	f.StringVar(&o.python, "python", "python3", "what runs train_torch.py")
	f.StringVar(&o.saveDir, "save-async", "", "directory to write checkpoints to, and to measure "+
		"what they cost")
	f.IntVar(&o.saveEvery, "save-every", 20, "steps from one checkpoint to the next")
	gib := f.Float64("memory", 0, "bound the memory of each machine: GiB, 0 for no bound")
	f.BoolVar(&o.largest, "largest", false, "train nothing: plan which GPTs of width 2048 fit "+
		"into --memory")
	watch := f.String("observe", "", "measure what it costs to observe a training: some of "+
		strings.Join(watchers, ",")+", or nothing to see the noise")
	f.StringVar(&o.trouble, "trouble", "", "get a training into trouble, and print the verdicts: "+
		strings.Join(troubles, ", "))
	f.BoolVar(&o.busy, "busy", false, "keep the GPU busy, for --trouble gpu of another process")
	f.IntVar(&o.layers, "layers", 0, "of transformers, 0 for those of the model")
	f.IntVar(&o.batch, "batch", 0, "of transformers, 0 for that of the model")
	f.BoolVar(&o.alone, "alone", true, "with several ranks, train on one alone before")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	o.memory = int(*gib * (1 << 30))
	if o.models = strings.Split(*list, ","); *watch != "" {
		o.watch = strings.Split(*watch, ",")
	}
	for _, name := range o.models {
		if _, ok := models[name]; !ok {
			return o, fmt.Errorf("--models: no model %q: there are %s", name,
				strings.Join(names(), ", "))
		}
	}
	for _, name := range strings.FieldsFunc(*precisions, func(r rune) bool { return r == ',' }) {
		p, err := precision(name)
		if err != nil {
			return o, err
		}
		o.precisions = append(o.precisions, p)
	}
	if o.device != "gpu" && o.device != "cpu" || min(o.ranks, o.rounds, o.steps, o.saveEvery) < 1 ||
		f.NArg() > 0 {
		return o, errors.New("want --device gpu or cpu, -n, --rounds, --steps and --save-every " +
			"1 or more, and no other arguments")
	}
	if min(o.memory, o.layers, o.batch) < 0 || o.largest && o.memory == 0 {
		return o, errors.New("want --memory, --layers and --batch of 0 or more, and a --memory " +
			"with --largest")
	}
	if o.shards < 0 || o.shards >= len(stages) {
		return o, errors.New("--shards wants 0 to 3")
	}
	if o.peer != "" && o.device != "cpu" || o.peer == gorgonias && o.ranks > 1 {
		return o, errors.New("--peer wants --device cpu, and gorgonia one rank")
	}
	if _, err := compression(o.wire); o.wire != "" && (err != nil || o.ranks == 1) {
		return o, errors.Join(errors.New("--wire wants bf16, f16, topk=0.01 or threshold=0.001, "+
			"and -n of 2 or more"), err)
	}
	return o, errors.Join(o.checkWatch(), o.checkTrouble())
}

// precision finds a precision by its name.
func precision(name string) (vm.Precision, error) {
	for _, p := range []vm.Precision{vm.F32, vm.TF32, vm.BF16} {
		if p.String() == name {
			return p, nil
		}
	}
	return 0, fmt.Errorf("--precisions: no precision %q: there are f32, tf32 and bf16", name)
}

func run(w io.Writer, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if o.largest {
		return o.writeLargest(w)
	}
	if o.busy {
		return o.beBusy(w, os.Stdin)
	}
	for _, name := range o.models {
		m := models[name].resized(o.layers, o.batch)
		precisions := o.precisions
		if len(precisions) == 0 {
			precisions = m.precisions
		}
		for _, p := range precisions {
			if err := o.measure(w, name, m, p); err != nil {
				return fmt.Errorf("%s in %v: %w", name, p, err)
			}
		}
	}
	return nil
}

// result is a line of output.
type result struct {
	Model     string  `json:"model"`
	Precision string  `json:"precision"`
	Mode      string  `json:"mode"`
	Ranks     int     `json:"ranks"`
	StepUS    float64 `json:"step_us"`
	Loss      float64 `json:"loss"`
	PeakMiB   int     `json:"peak_mib"`
	DriverMiB int     `json:"driver_mib"`
	BeforeMiB int     `json:"before_mib"` // of driver_mib, before there was a machine
	Fused     int     `json:"fused"`
	Arena     int     `json:"arena_bytes"`
	HostOps   int     `json:"host_ops"`
	PlanMiB   int64   `json:"plan_mib"`        // of all memory
	Extra     float64 `json:"extra,omitempty"` // time of rematerialized steps, by the plan
	Peer      string  `json:"peer,omitempty"`
	PeerUS    float64 `json:"peer_us,omitempty"`
	Ratio     float64 `json:"ratio,omitempty"`  // of the time of a step by that of the peer
	Layers    int     `json:"layers,omitempty"` // of the command line
	Batch     int     `json:"batch,omitempty"`
	Shards    int     `json:"shards,omitempty"`
	Wire      string  `json:"wire,omitempty"`
	Params    int64   `json:"parameter_bytes,omitempty"`
	Solver    int64   `json:"solver_bytes,omitempty"`
	Gradients int64   `json:"gradient_bytes,omitempty"`
	saved
	overlap
}

// rank is where one rank trains.
type rank struct {
	device backend.Device       // nil for the host
	comm   backend.Communicator // nil if it is alone
	shards vm.Shards
	wire   string      // what gradients travel in, "" for what they are
	build  sync.Locker // held while it builds its graph
	memory int         // bytes of its machine, 0 for no bound
}

// measure trains a model on one device, or on one for each rank.
func (o options) measure(w io.Writer, name string, m model, p vm.Precision) (err error) {
	if o.watch != nil {
		return o.observe(w, name, m, p)
	}
	if o.trouble != "" {
		return o.inTrouble(w, name, m, p)
	}
	peer, err := o.start(name, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, peer.close()) }()
	r := result{Model: name, Precision: p.String(), Mode: "plan", Ranks: o.ranks, Shards: o.shards,
		Layers: o.layers, Batch: o.batch, Wire: o.wire}
	if o.ranks == 1 {
		return o.onOne(func(on rank) error {
			return o.train(w, r, m, p, on, peer, make([]measurement, 1))
		})
	}
	if o.alone {
		if err := o.onOne(func(on rank) error {
			r.one, err = o.stepOf(m, p, on)
			return err
		}); err != nil {
			return fmt.Errorf("one rank alone: %w", err)
		}
	}
	all := make([]measurement, o.ranks)
	return euryale.Run(context.Background(), o.ranks, func(comm backend.Communicator,
		build sync.Locker) (err error) {
		on := rank{comm: comm, build: build, memory: o.memory, shards: stages[o.shards],
			wire: o.wire}
		if on.device, err = o.deviceOf(comm); err != nil {
			return err
		}
		return o.train(w, r, m, p, on, peer, all)
	}, o.backends()...)
}

// backends returns what euryale.Run chooses from: nil for all, GPUs first.
func (o options) backends() []backend.Backend {
	if o.device == "cpu" {
		return []backend.Backend{host.Backend{}}
	}
	return nil
}

// deviceOf returns the device of a rank, nil for the host.
func (o options) deviceOf(comm backend.Communicator) (backend.Device, error) {
	d := comm.Device()
	switch {
	case o.device == "cpu":
		return nil, nil
	case d.Name() == "host":
		return nil, fmt.Errorf("backend %s has no GPU: see euryale doctor",
			comm.Capabilities().Backend)
	}
	return d, nil
}

// onOne runs f on one device.
func (o options) onOne(f func(on rank) error) (err error) {
	on := rank{build: &sync.Mutex{}, memory: o.memory}
	if o.device == "gpu" {
		gpu, err := cuda.Open(0)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, gpu.Close()) }()
		on.device = gpu
	}
	return f(on)
}

// compression returns how gradients travel.
func compression(wire string) (func(backend.Communicator) (backend.Communicator, error), error) {
	if dtype, err := backend.ParseDType(wire); err == nil && (wire == "f16" || wire == "bf16") {
		return half.Wrap(dtype), nil
	}
	how, err := sparse.ParseSelection(wire)
	return sparse.Wrap(how), err
}

// machine makes the machine of one rank, and says which node is the loss.
func (m model) machine(p vm.Precision, on rank) (*vm.Machine, *gorgonia.Node, error) {
	options := []vm.Option{vm.WithPrecision(p)}
	if on.comm != nil {
		var gradients []autograd.Option
		if on.wire != "" {
			wrap, err := compression(on.wire)
			if err != nil {
				return nil, nil, err
			}
			gradients = append(gradients, autograd.WithCompression(wrap))
		}
		options = append(options, vm.WithDataParallel(on.comm, gradients...),
			vm.WithShards(on.shards))
	}
	if on.memory > 0 {
		options = append(options, vm.WithMemory(on.memory))
	}
	b, loss, err := m.graph(uint64(on.number()), on.build)
	if err != nil {
		return nil, nil, err
	}
	machine, err := vm.New(b.graph, on.device,
		append(options, vm.WithSolver(m.solver(), b.learnables...))...)
	return machine, loss, err
}

// measurement is what one rank has measured.
type measurement struct {
	times  []float64 // of its rounds
	waited []bucket
}

// train measures on one rank, and notes that in all. Rank 0 takes turns with a peer, and writes
// the result of the slowest rank.
func (o options) train(w io.Writer, r result, m model, p vm.Precision, on rank, peer *peer,
	all []measurement) (err error) {
	if _, r.BeforeMiB, err = memory(on.device); err != nil {
		return err
	}
	machine, loss, err := m.machine(p, on)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, machine.Close()) }()
	if o.saveDir != "" {
		machine.DataParallel() // what makes it later begins with copies on the host
	}
	ours, theirs, err := o.time(machine, on, peer)
	if err != nil {
		return err
	}
	if r.saved, err = o.save(machine, on); err != nil {
		return err
	}
	r.Loss = math.Round(value(loss)*1e4) / 1e4
	waited, err := on.exposed(machine)
	if err != nil {
		return err
	}
	me := on.number()
	on.build.Lock() // the one lock of all ranks
	all[me] = measurement{ours, waited}
	on.build.Unlock()
	if err := on.meet(); err != nil || me > 0 {
		return errors.Join(err, o.profiled(io.Discard, machine))
	}
	on.build.Lock()
	ours = slowestOf(all)
	r.StepUS = round1(bench.Median(slices.Clone(ours)))
	r.overlap.count(all, r.StepUS)
	on.build.Unlock()
	if on.comm != nil {
		s := machine.Summary()
		r.Params, r.Solver, r.Gradients = s.ParameterBytes, s.SolverBytes, s.Memory.Gradients
	}
	if peer != nil {
		r.Peer, r.PeerUS, r.Ratio = peer.name, round1(bench.Median(slices.Clone(theirs))),
			medianRatio(ours, theirs)
	}
	if err := r.count(machine.Plan().String()); err != nil {
		return err
	}
	s := machine.Summary().Memory
	r.PlanMiB, r.Extra = s.Total()>>20, s.Extra
	if r.PeakMiB, r.DriverMiB, err = memory(on.device); err != nil {
		return err
	}
	if err := json.NewEncoder(w).Encode(r); err != nil {
		return err
	}
	return o.profiled(w, machine)
}

// number is its own among the ranks.
func (on rank) number() int {
	if on.comm == nil {
		return 0
	}
	return on.comm.Rank()
}

// meet waits for the other ranks.
func (on rank) meet() error {
	if on.comm == nil {
		return nil
	}
	return backend.Barrier(on.comm)
}

// graph builds the graph of a model, with its gradients.
func (m model) graph(seed uint64, build sync.Locker) (*builder, *gorgonia.Node, error) {
	build.Lock()
	defer build.Unlock()
	b := newBuilder(seed)
	loss := m.build(b)
	if b.err != nil {
		return nil, nil, b.err
	}
	_, err := gorgonia.Grad(loss, b.learnables...)
	return b, loss, err
}

// count reads the counts in the last line of a plan.
func (r *result) count(plan string) error {
	plan = strings.TrimSpace(plan)
	last := plan[strings.LastIndexByte(plan, '\n')+1:]
	var steps, loops int
	if _, err := fmt.Sscanf(last, "steps=%d loops=%d fused=%d arena_bytes=%d host_ops=%d", &steps,
		&loops, &r.Fused, &r.Arena, &r.HostOps); err != nil {
		return fmt.Errorf("the counts of the plan in %q: %w", last, err)
	}
	return nil
}

// time returns the times of a step in each round, in microseconds, and those of a peer in between.
func (o options) time(m *vm.Machine, on rank, peer *peer) (ours, theirs []float64, err error) {
	for range warmUp + o.rounds {
		if peer != nil && on.number() == 0 {
			t, err := peer.round()
			if err != nil {
				return nil, nil, fmt.Errorf("%s: %w", peer.name, err)
			}
			theirs = append(theirs, t)
		}
		if err := on.meet(); err != nil {
			return nil, nil, err
		}
		begin := time.Now()
		for range o.steps {
			if err := m.RunAll(); err != nil {
				return nil, nil, err
			}
		}
		ours = append(ours, micros(time.Since(begin))/float64(o.steps))
	}
	if peer != nil && theirs != nil {
		theirs = theirs[warmUp:]
	}
	return ours[warmUp:], theirs, nil
}

// slowestOf returns the time of the slowest rank in each round.
func slowestOf(all []measurement) []float64 {
	slowest := slices.Clone(all[0].times)
	for _, of := range all[1:] {
		for i, t := range of.times {
			slowest[i] = max(slowest[i], t)
		}
	}
	return slowest
}

// medianRatio returns the median of the ratios of rounds.
func medianRatio(ours, theirs []float64) float64 {
	ratios := make([]float64, len(ours))
	for i := range ratios {
		ratios[i] = ours[i] / theirs[i]
	}
	return math.Round(bench.Median(ratios)*1e3) / 1e3
}

func round1(x float64) float64 { return math.Round(x*10) / 10 }

// value returns the value of a scalar.
func value(n *gorgonia.Node) float64 {
	x, _ := n.Value().Data().(float32)
	return float64(x)
}

// memory returns the most that was in use on a device, and what the driver says is in use, in MiB.
func memory(device backend.Device) (peak, driver int, err error) {
	d, ok := device.(interface {
		MemoryStats() cuda.MemoryStats
		ReleaseMemory() error
		FreeMemory() (free, total int, err error)
	})
	if !ok {
		return 0, 0, nil // the host
	}
	if err := d.ReleaseMemory(); err != nil {
		return 0, 0, err
	}
	free, total, err := d.FreeMemory()
	return d.MemoryStats().Peak >> 20, (total - free) >> 20, err
}

// How many steps and operations profile prints.
const slowest, operations = 10, 25

// profiled prints the slowest steps of a plan, and the sum of all, if that is wanted. All ranks
// call it.
func (o options) profiled(w io.Writer, m *vm.Machine) error {
	if !o.profile {
		return nil
	}
	times, err := m.Profile()
	if err != nil {
		return err
	}
	var sum time.Duration
	for _, t := range times {
		sum += t.Time
	}
	fmt.Fprintf(w, "# %d steps one by one: %v\n", len(times), sum)
	for _, t := range longest(times, slowest) {
		fmt.Fprintf(w, "# %s  %s of %s\n", cost(t), t.Op, t.Node)
	}
	fmt.Fprintln(w, "# all steps of an operation:")
	for _, t := range longest(byOperation(times), operations) {
		fmt.Fprintf(w, "# %s  %s %s\n", cost(t), t.Node, t.Op)
	}
	return nil
}

// cost is the time of a step, its bytes, and how many of them it moves in a second.
func cost(t vm.StepTime) string {
	return fmt.Sprintf("%8.1f us %8.1f MB %5.0f GB/s", micros(t.Time), float64(t.Bytes)/1e6,
		float64(t.Bytes)/max(float64(t.Time.Nanoseconds()), 1))
}

// longest returns the n steps that took longest.
func longest(times []vm.StepTime, n int) []vm.StepTime {
	slices.SortStableFunc(times, func(a, b vm.StepTime) int { return cmp.Compare(b.Time, a.Time) })
	return times[:min(n, len(times))]
}

// byOperation adds up the steps that compute the same, with their number in place of the node.
func byOperation(times []vm.StepTime) []vm.StepTime {
	number, sum := map[string]int{}, map[string]vm.StepTime{}
	for _, t := range times {
		s := sum[t.Op]
		number[t.Op]++
		sum[t.Op] = vm.StepTime{Time: s.Time + t.Time, Bytes: s.Bytes + t.Bytes}
	}
	var all []vm.StepTime
	for _, op := range slices.Sorted(maps.Keys(sum)) {
		all = append(all, vm.StepTime{Op: op, Node: fmt.Sprint(number[op], " x"),
			Time: sum[op].Time, Bytes: sum[op].Bytes})
	}
	return all
}

func micros(t time.Duration) float64 { return float64(t.Nanoseconds()) / 1e3 }

// sgd is train_torch.py's.
func sgd() solver.Solver { return &solver.Momentum{Rate: 1e-3, Momentum: 0.9} }

// decayed is train_torch.py's, and that of examples/resnet.
func decayed() solver.Solver {
	return &solver.Momentum{Rate: 1e-3, Momentum: 0.9, WeightDecay: 5e-4}
}

// adam is train_torch.py's.
func adam() solver.Solver { return &solver.Adam{Rate: 1e-3} }

// adamw is train_torch.py's, with PyTorch's weight decay.
func adamw() solver.Solver { return &solver.AdamW{Rate: 1e-4, WeightDecay: 0.01} }
