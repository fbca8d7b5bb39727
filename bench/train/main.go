// Command train measures training steps of package vm, beside PyTorch's of bench/peers/train_torch.py:
//
//	go run -tags gpu ./bench/train --models mlp,mlp-large --precisions f32,tf32 > plan.jsonl
//
// It trains each model on random data, with the solver in the plan, and writes one JSON line for each model and
// precision, with the keys of train_torch.py and the counts of the plan:
//
//	{"model":"mlp","precision":"f32","mode":"plan","ranks":1,"step_us":84.3,"loss":1.71,"peak_mib":3,"driver_mib":812,"fused":31,"arena_bytes":262144,"host_ops":0}
//
// step_us is the median of --rounds rounds of 10 steps each. peak_mib is the most memory that was in
// use on the device, and driver_mib what the driver says is in use at the end, context and libraries
// included. --profile prints the ten steps of the plan that took longest when they ran one by one.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/vm"
)

// What train_torch.py does, too.
const (
	steps  = 10 // of a round
	warmUp = 2  // rounds
)

func main() {
	if err := run(os.Stdout, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "train:", err)
		os.Exit(1)
	}
}

// options are the command line.
type options struct {
	models     []string
	precisions []vm.Precision // those of each model if empty
	device     string
	rounds     int
	profile    bool
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("train", flag.ContinueOnError)
	list := f.String("models", strings.Join(names(), ","), "what to train")
	precisions := f.String("precisions", "", "some of f32, tf32, bf16; empty for those of train_torch.py")
	f.StringVar(&o.device, "device", "gpu", "gpu or cpu")
	f.IntVar(&o.rounds, "rounds", 15, fmt.Sprintf("rounds of %d steps", steps))
	f.BoolVar(&o.profile, "profile", false, "print the slowest steps of each plan")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	o.models = strings.Split(*list, ",")
	for _, name := range o.models {
		if _, ok := models[name]; !ok {
			return o, fmt.Errorf("--models: no model %q: there are %s", name, strings.Join(names(), ", "))
		}
	}
	for _, name := range strings.FieldsFunc(*precisions, func(r rune) bool { return r == ',' }) {
		p, err := precision(name)
		if err != nil {
			return o, err
		}
		o.precisions = append(o.precisions, p)
	}
	if o.device != "gpu" && o.device != "cpu" || o.rounds < 1 || f.NArg() > 0 {
		return o, errors.New("want --device gpu or cpu, --rounds 1 or more, and no other arguments")
	}
	return o, nil
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
	for _, name := range o.models {
		m := models[name]
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
	Fused     int     `json:"fused"`
	Arena     int     `json:"arena_bytes"`
	HostOps   int     `json:"host_ops"`
}

// measure trains a model on a device of its own.
func (o options) measure(w io.Writer, name string, m model, p vm.Precision) (err error) {
	var device backend.Device
	if o.device == "gpu" {
		gpu, err := cuda.Open(0)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, gpu.Close()) }()
		device = gpu
	}
	b := newBuilder()
	loss := m.build(b)
	if b.err != nil {
		return b.err
	}
	if _, err := gorgonia.Grad(loss, b.learnables...); err != nil {
		return err
	}
	machine, err := vm.New(b.graph, device, vm.WithPrecision(p), vm.WithSolver(m.solver(), b.learnables...))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, machine.Close()) }()
	r := result{Model: name, Precision: p.String(), Mode: "plan", Ranks: 1}
	if r.StepUS, err = o.time(machine); err != nil {
		return err
	}
	r.Loss = value(loss)
	if err := r.count(machine.Plan().String()); err != nil {
		return err
	}
	if r.PeakMiB, r.DriverMiB, err = memory(device); err != nil {
		return err
	}
	if err := json.NewEncoder(w).Encode(r); err != nil || !o.profile {
		return err
	}
	return profile(w, machine)
}

// count reads the counts in the last line of a plan.
func (r *result) count(plan string) error {
	plan = strings.TrimSpace(plan)
	last := plan[strings.LastIndexByte(plan, '\n')+1:]
	var steps, loops int
	if _, err := fmt.Sscanf(last, "steps=%d loops=%d fused=%d arena_bytes=%d host_ops=%d", &steps, &loops, &r.Fused, &r.Arena, &r.HostOps); err != nil {
		return fmt.Errorf("the counts of the plan in %q: %w", last, err)
	}
	return nil
}

// time returns the median time of a step, in microseconds.
func (o options) time(m *vm.Machine) (float64, error) {
	var rounds []float64
	for range warmUp + o.rounds {
		begin := time.Now()
		for range steps {
			if err := m.RunAll(); err != nil {
				return 0, err
			}
		}
		rounds = append(rounds, float64(time.Since(begin).Nanoseconds())/1e3/steps)
	}
	rounds = rounds[warmUp:]
	slices.Sort(rounds)
	middle := len(rounds) / 2
	return float64(int((rounds[middle]+rounds[len(rounds)-1-middle])/2*10)) / 10, nil
}

// value is that of a scalar.
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

// slowest is how many steps profile prints.
const slowest = 10

// profile prints the slowest steps of a plan, and the sum of all.
func profile(w io.Writer, m *vm.Machine) error {
	times, err := m.Profile()
	if err != nil {
		return err
	}
	var sum time.Duration
	for _, t := range times {
		sum += t.Time
	}
	slices.SortStableFunc(times, func(a, b vm.StepTime) int { return int(b.Time - a.Time) })
	fmt.Fprintf(w, "# %d steps one by one: %v\n", len(times), sum)
	for _, t := range times[:min(slowest, len(times))] {
		fmt.Fprintf(w, "# %8.1f us  %s\n", float64(t.Time.Nanoseconds())/1e3, t.Step)
	}
	return nil
}

// sgd is train_torch.py's.
func sgd() autograd.Solver { return &autograd.Momentum{Rate: 1e-3, Momentum: 0.9} }

// adamw is train_torch.py's, with PyTorch's weight decay.
func adamw() autograd.Solver { return &autograd.AdamW{Rate: 1e-4, WeightDecay: 0.01} }
