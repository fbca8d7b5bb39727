package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/usage"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/models/texts"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

const (
	evalBatches = 8 // of the samples that are held out, without --eval
	seed        = 1 // of an adapter's first weights, the order of samples and the masks of dropout
)

// trainer is a model that all ranks train, as the command line says.
type trainer struct {
	folder, out, checkpoint, device, precision, targets string
	data, evalData                                      []string
	params                                              string // hash of what is in --out
	lora, context, batch, accumulate, steps, every      int
	sp, tp, shards                                      int
	lr, alpha, memory, peak                             float64
	dropout, pack, best                                 bool
	comm                                                backend.Communicator
	layout                                              *layers.Layout
	model                                               *models.Model
	training, heldOut                                   []texts.Sample
	order                                               []int // of the samples in an epoch
	epoch                                               int
	tokens, next                                        *layers.Tokens // of a run
	positions                                           *layers.Tokens // nil without --pack
	loss                                                layers.Node
	machine, eval                                       *vm.Machine
	solver                                              solver.AdamW
	past                                                past
}

// past is what a checkpoint has besides weights and solver.
type past struct {
	Training   string // what must be the same on resuming
	Steps      int
	Loss, Eval float64 // the running mean, and of held-out samples
	Best       float64 // the least Eval
	BestStep   int     // after which it was; 0 for none
}

// read makes the samples, which are the same on all ranks.
func (t *trainer) read() {
	samples, cut, err := texts.Read(t.folder, t.context, t.data...)
	check(err)
	if t.training = samples; t.evalData == nil {
		t.training, t.heldOut = divided(samples)
	} else {
		t.heldOut, _, err = texts.Read(t.folder, t.context, t.evalData...)
		check(err)
	}
	if t.pack {
		t.training = must(texts.Pack(t.training, t.context))
		t.heldOut = must(texts.Pack(t.heldOut, t.context))
	}
	if t.evalData == nil { // in another order than that of Pack, by length
		rand.New(rand.NewPCG(seed, 0)).Shuffle(len(t.heldOut), func(i, j int) {
			t.heldOut[i], t.heldOut[j] = t.heldOut[j], t.heldOut[i]
		})
		t.heldOut = t.heldOut[:min(len(t.heldOut), evalBatches*t.batch)]
	}
	if len(t.training) == 0 || len(t.heldOut) == 0 {
		check(fmt.Errorf("--data has %d samples of a context of %d: at least 10 are needed, or 1 "+
			"and one of --eval", len(samples), t.context))
	}
	t.print("%d samples to train on, %d held out, %d conversations lose their end", len(t.training),
		len(t.heldOut), cut)
}

// divided holds out up to a tenth of samples: whole documents that are drawn from all. Of a text
// that is more than a tenth itself, samples are drawn, whose targets are in no other; answers of a
// conversation are in the samples of later ones.
func divided(samples []texts.Sample) (training, heldOut []texts.Sample) {
	tenth := len(samples) / 10
	sizes := map[int]int{}
	for _, s := range samples {
		sizes[s.Document]++
	}
	units, last := [][]texts.Sample(nil), -1
	for _, s := range samples {
		text := s.Count() == len(s.Tokens)
		if s.Document != last || text && sizes[s.Document] > tenth {
			units = append(units, nil)
		}
		at := len(units) - 1
		units[at], last = append(units[at], s), s.Document
	}
	held := map[int]bool{}
	for _, i := range rand.New(rand.NewPCG(seed, 0)).Perm(len(units)) {
		if len(units[i]) <= tenth {
			held[i] = true
			tenth -= len(units[i])
		}
	}
	for i, unit := range units {
		if held[i] {
			heldOut = append(heldOut, unit...)
		} else {
			training = append(training, unit...)
		}
	}
	return training, heldOut
}

// build makes the graph and its machines.
func (t *trainer) build() {
	hash := sha256.New()
	for _, s := range slices.Concat(t.training, t.heldOut) {
		var text []byte
		for _, id := range slices.Concat(s.Tokens, s.Targets) {
			text = binary.LittleEndian.AppendUint32(text, uint32(id))
		}
		hash.Write(text)
	}
	t.past.Training = fmt.Sprintf("context %d, batch %d, steps %d, lora %d, lr %g, %s, model and "+
		"samples %x", t.context, t.batch, t.steps, t.lora, t.lr, t.precision,
		sha256.Sum256(fmt.Append([]byte(must(t.model.Fingerprint())), t.model.Config, t.dropout,
			t.alpha, t.targets, hash.Sum(nil))))
	check(autograd.Agree(t.comm, t.past.Training, t.writable())) // not at the end
	as := map[string]vm.Precision{"f32": vm.F32, "tf32": vm.TF32, "bf16": vm.BF16}[t.precision]
	device := map[string]backend.Device{"auto": t.comm.Device(), "cpu": nil}[t.device]
	t.layout = must(layers.NewLayout(t.comm, 0, t.sp, t.tp))
	if t.model.Random = nil; t.dropout {
		t.model.Random = nn.NewRandom(seed)
	}
	if t.lora > 0 {
		check(t.model.Adapt(models.LoRA{Rank: t.lora, Alpha: t.alpha, Targets: t.layers()}))
	}
	b := layers.NewBuilder(gorgonia.NewGraph(), t.layout, tensor.Float32, seed)
	if t.accumulate > 1 { // 1 batch would make gradients a mean, which no other layout has
		b.Batches(t.layout.DP * t.accumulate)
	}
	rows := t.batch / t.layout.DP / t.accumulate
	t.tokens = b.Tokens("tokens", 1, rows, t.context)
	t.next = b.Tokens("targets", 1, rows, t.context).Padding(texts.Ignored)
	var positions []*layers.Tokens
	if t.pack {
		t.positions = b.Tokens("positions", 1, rows, t.context)
		positions = append(positions, t.positions)
	}
	t.loss = b.CrossEntropy(must(t.model.Logits(b, t.tokens, positions...)), t.next)
	check(b.Err())
	options := []vm.Option{vm.Keep(t.loss.Node), vm.WithPrecision(as), vm.WithFrozen(b.Frozen()...)}
	t.eval = must(vm.New(b.Graph(), device, append(options, vm.Eval())...))
	learnables := must(b.Grad(t.loss)) // behind the machine for evaluation, which has no gradients
	t.solver.Rate = t.lr
	options = append(options, vm.ClipNorm(1), vm.WithSolver(&t.solver, learnables...), b.Training())
	if t.shards > 0 {
		options = append(options, vm.WithShards(1<<t.shards-1)) // each needs those before it
	}
	if t.memory > 0 {
		options = append(options, vm.WithMemory(int(t.memory*(1<<30))))
	}
	t.machine = must(vm.New(b.Graph(), device, options...))
}

// writable makes the folder of --out, and tries it before the training.
func (t *trainer) writable() error {
	_, err := os.Stat(filepath.Join(t.out, "config.json"))
	switch {
	case t.lora > 0 && err != nil && !errors.Is(err, os.ErrNotExist):
		return err
	case t.lora > 0 && err == nil:
		return fmt.Errorf("--lora %d --out %s: it has a model, and an adapter would be applied to "+
			"it: name another folder", t.lora, t.out)
	}
	err = os.MkdirAll(t.out, 0o777)
	f, failed := os.CreateTemp(t.out, ".training-")
	if failed == nil {
		failed = errors.Join(f.Close(), os.Remove(f.Name()))
	}
	return cmp.Or(err, failed)
}

// train trains until all steps are done, or until a signal on any rank ends it, which is an error.
func (t *trainer) train(ctx context.Context) (stop error) {
	data, kept := t.machine.DataParallel(), past{}
	if t.checkpoint != "" {
		err := data.Load(t.checkpoint, &t.solver, &kept)
		if err == nil && kept.Training != t.past.Training {
			err = fmt.Errorf("--checkpoint: is of %s; this is %s", kept.Training, t.past.Training)
		}
		if !errors.Is(err, os.ErrNotExist) { // otherwise training begins
			check(err)
			t.past = kept
			t.print("going on after step %d, from %s", kept.Steps, t.checkpoint)
		}
	}
	rise := min(100, t.steps/10)
	rate := solver.Warmup(rise, solver.Cosine(t.lr, t.lr/10, max(1, t.steps-rise)))
	began, first, tokens := time.Now(), t.past.Steps, 0 // of the next line
	for p := &t.past; p.Steps < t.steps; {
		t.solver.SetRate(rate(p.Steps))
		batch := t.samples(p.Steps)
		loss := t.over(batch, p.Steps, t.machine)
		for _, s := range batch {
			tokens += len(s.Tokens)
		}
		p.Steps++
		p.Loss += (loss - p.Loss) / float64(min(20, p.Steps))
		due, better := p.Steps%t.every == 0 || p.Steps == t.steps, false
		if due {
			took := time.Since(began)
			better = t.evaluate()
			t.print("step %d/%d: loss=%.4f eval=%.4f %s", p.Steps, t.steps, p.Loss, p.Eval,
				t.speed(tokens, p.Steps-first, took))
		}
		if t.checkpoint != "" {
			stop = must(autograd.Stopped(ctx, t.comm))
		}
		var options []autograd.SaveOption
		if better {
			options = append(options, autograd.Pin())
		}
		if t.checkpoint != "" && (due || stop != nil) {
			check(data.Save(t.checkpoint, &t.solver, p, options...))
		} else if t.best && better {
			t.write()
		}
		if due {
			began, first, tokens = time.Now(), p.Steps, 0
		}
		if stop != nil && p.Steps < t.steps {
			t.print("saved in %s after step %d: start it again to go on", t.checkpoint, p.Steps)
			return stop
		}
	}
	return nil
}

// samples returns the batch of a step, the same on all ranks: epochs follow each other.
func (t *trainer) samples(step int) (batch []texts.Sample) {
	for n := len(t.training); len(batch) < t.batch; {
		at := step*t.batch + len(batch)
		if epoch := 1 + at/n; epoch != t.epoch {
			t.epoch, t.order = epoch, rand.New(rand.NewPCG(seed, uint64(epoch))).Perm(n)
		}
		batch = append(batch, t.training[t.order[at%n]])
	}
	return batch
}

// evaluate evaluates the samples that are held out, and reports whether they have the least loss.
func (t *trainer) evaluate() (better bool) {
	if t.shards > 0 {
		check(t.machine.Pull()) // the weights that ranks shard
	}
	p := &t.past
	p.Eval = t.over(t.heldOut, 0, t.eval)
	if better = p.BestStep == 0 || p.Eval < p.Best; better {
		p.Best, p.BestStep = p.Eval, p.Steps
	}
	return better
}

// speed says how fast steps were.
func (t *trainer) speed(tokens, steps int, took time.Duration) string {
	passes := 3. // forward, and two products backward for each one
	if t.lora > 0 {
		passes = 2 // frozen weights have no gradient
	}
	tflops := passes * float64(t.eval.Summary().FLOPs) * float64(steps*t.accumulate) / 1e12 /
		took.Seconds()
	text := fmt.Sprintf("tokens/s=%.0f tflops=%.3g", float64(tokens)/took.Seconds(), tflops)
	if t.peak > 0 {
		text += fmt.Sprintf(" mfu=%.3g", tflops/t.peak)
	}
	left := time.Duration(float64(took) / float64(steps) * float64(t.steps-t.past.Steps))
	return text + fmt.Sprint(" left=", left.Round(time.Second))
}

// over runs a machine on samples of all ranks, and returns the mean loss of their targets.
func (t *trainer) over(samples []texts.Sample, step int, m *vm.Machine) (loss float64) {
	total := count(samples)
	for first := 0; first < len(samples); first += t.batch / t.accumulate {
		run := samples[first:min(first+t.batch/t.accumulate, len(samples))]
		of := total // which the loss of a run divides by
		if m == t.eval {
			of = count(run)
		}
		t.feed(run, step, first)
		check(errors.Join(t.next.Count(of), m.RunAll()))
		loss += float64(t.loss.Value().Data().(float32)) * float64(of) / float64(total)
	}
	check(autograd.Sum(t.layout.Data, &loss))
	return loss
}

func count(samples []texts.Sample) (targets int) {
	for _, s := range samples {
		targets += s.Count()
	}
	return targets
}

// feed gives the graph this rank's part of the samples of a run, of which first is the number of
// the first one in a step. Where there are none, no target counts.
func (t *trainer) feed(samples []texts.Sample, step, first int) {
	rows := t.batch / t.layout.DP / t.accumulate
	tokens, next := make([]int, rows*t.context), make([]int, rows*t.context)
	positions := make([]int, rows*t.context)
	for row := range rows {
		var s texts.Sample
		if i := t.layout.Replica*rows + row; i < len(samples) {
			s = samples[i]
		}
		from, to := row*t.context, (row+1)*t.context
		n := copy(tokens[from:to], s.Tokens)
		copy(next[from:to], s.Targets)
		copy(positions[from:to], s.Positions)
		for i := n; i < t.context; i++ {
			next[from+i], positions[from+i] = texts.Ignored, i-n
		}
	}
	err := errors.Join(t.tokens.Set(tokens), t.next.Set(next))
	if t.positions != nil {
		err = errors.Join(err, t.positions.Set(positions))
	}
	check(err)
	if t.model.Random != nil {
		t.model.Random.Seek(uint64(step), first+t.layout.Replica*rows)
	}
}

// writeLast writes the model, unless that of the best evaluation has been written.
func (t *trainer) writeLast() {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT) // the training would be lost
	if t.best && t.checkpoint != "" {
		data := t.machine.DataParallel()
		dir := must(data.Pinned(t.checkpoint))
		check(data.Load(dir, &t.solver, nil, autograd.WeightsOnly()))
	}
	if t.best {
		t.past.Eval = t.past.Best
	}
	if t.checkpoint != "" || !t.best {
		t.write()
	}
}

// write verifies that all ranks have the same model, and writes it. After an error the training is
// in a checkpoint.
func (t *trainer) write() {
	data, save := t.machine.DataParallel(), t.model.Save
	if t.lora > 0 {
		save = t.model.SaveAdapter
	}
	check(data.Check())
	var err error
	t.params, err = data.Weights(func(weights iter.Seq2[string, *tensor.Dense]) error {
		return save(t.out, usage.Bytes("writing "+t.out, weights))
	})
	if err == nil {
		return
	}
	dir := t.checkpoint
	if dir == "" {
		id := float64(time.Now().UnixMicro()) // all ranks have the mean
		check(autograd.Mean(t.comm, &id))
		dir = filepath.Join(t.out, fmt.Sprintf(".training-%.0f", id))
		err = errors.Join(err, data.Save(dir, &t.solver, &t.past, autograd.Pin()))
	}
	check(fmt.Errorf("%w: start again with --checkpoint %s, where the training is", err, dir))
}
