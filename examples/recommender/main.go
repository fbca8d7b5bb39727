// Command recommender learns which items users like from what they have taken. The vectors of a
// million users are sharded among the ranks, and a step costs what the rows cost that it needs:
//
//	euryale run -n 2 ./examples/recommender
//
// Users and items have vectors. What a user has taken competes with items that are drawn evenly
// (negative sampling), by the product of vectors: the loss is the cross-entropy. Interactions are
// drawn from a [world]. recall@10 is the share of those held out whose item is among the first ten
// for its user: by the model, by popularity, and, as the best possible, by the world. Rank 0 prints
// a line for each epoch, and a last line for programs, with the SHA-256 of all rows:
//
//	epoch 10/10: loss=1.4212 recall@10=0.3020 steps/s=116
//	recall@10=0.3020 popularity=0.0630 best=0.3408 ranks=2 backend=host params=35f9… seconds=97
package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"time"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/usage"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/curves"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

const (
	seed    = 1
	first   = 10 // items that are recommended
	heldOut = 8  // batches of interactions
)

// config is the command line.
type config struct {
	world
	width, batch, negatives, epochs, steps, digits int
	rate                                           float64
	device, curve                                  string
}

func main() {
	var c config
	flag.IntVar(&c.users, "users", 1_000_000, "rows of the table of users")
	flag.IntVar(&c.items, "items", 2000, "rows of the table of items: a multiple of 20")
	flag.IntVar(&c.width, "width", 16, "numbers of a vector")
	flag.IntVar(&c.batch, "batch", 512, "interactions in a step, of all ranks together")
	flag.IntVar(&c.negatives, "negatives", 20, "items that an interaction competes with")
	flag.IntVar(&c.epochs, "epochs", 10, "of the training")
	flag.IntVar(&c.steps, "steps", 1000, "of an epoch")
	flag.Float64Var(&c.rate, "rate", 0.2, "of learning at first, for each interaction")
	flag.IntVar(&c.digits, "digits", 4, "of losses that are printed")
	flag.StringVar(&c.device, "device", "auto", "cpu, or auto for a GPU if there is one")
	flag.StringVar(&c.curve, "curve", "", "draw loss and recall here, as an SVG")
	flag.Parse()
	c.check(1) // how many ranks there are is not known yet
	comm := must(euryale.Init(context.Background()))
	defer comm.Close()
	c.check(comm.Size())
	t := newTrainer(comm, c)
	defer t.layout.Close()
	defer t.machine.Close()
	t.train()
}

// check ends the program for a wrong command line.
func (c config) check(ranks int) {
	usage.Check("recommender", usage.OneOf("device", "cpu", "auto"), usage.NoArguments(),
		usage.AtLeast(float64(ranks), "users"), usage.AtLeast(0, "rate", "digits"),
		usage.AtLeast(1, "width", "batch", "negatives", "epochs", "steps"),
		usage.AtLeast(float64(max(clusters, ranks)), "items"),
		usage.Unless(c.items%clusters == 0, "items", "a multiple of %d", clusters),
		usage.Unless(c.batch%ranks == 0, "batch", "a multiple of %d ranks", ranks))
}

// trainer is a model that all ranks train.
type trainer struct {
	config
	comm    backend.Communicator
	layout  *layers.Layout
	own     int               // interactions in a step, of this rank
	tables  [2]*layers.Table  // of users and of items
	tokens  [2]*layers.Tokens // who: [own]; what: [own, 1+negatives], the first was taken
	rows    [2]*G.Node        // of the tokens
	loss    *G.Node           // the sum over this rank's interactions
	machine *vm.Machine
	out     io.Writer
	past    []fit.Epoch // those that are over
}

func newTrainer(comm backend.Communicator, c config) *trainer {
	t := &trainer{config: c, comm: comm, own: c.batch / comm.Size(), out: io.Discard}
	if comm.Rank() == 0 {
		t.out = os.Stdout
	}
	device := map[string]backend.Device{"auto": comm.Device(), "cpu": nil}[c.device]
	t.layout = must(layers.NewLayout(comm, 0, 1, 1))
	b := layers.NewBuilder(G.NewGraph(), t.layout, tensor.Float64, seed)
	shapes := [][]int{{t.own}, {t.own, 1 + c.negatives}}
	for i, name := range []string{"users", "items"} {
		mean := []float64{0.3, 0}[i] // what users have in common lets items learn popularity
		init := func(r *rand.Rand) float64 { return mean + 0.1*r.NormFloat64() }
		t.tables[i] = b.Table(name, init, []int{c.users, c.items}[i], c.width)
		t.tokens[i] = b.Tokens(name, 0, shapes[i]...)
		t.rows[i] = t.tables[i].Lookup(t.tokens[i]).Node
	}
	loss := b.Apply("loss", t.competition)
	must(b.Grad(loss))
	t.loss = loss.Node
	keep := append(t.tables[0].Gradients(), append(t.tables[1].Gradients(), t.loss)...)
	t.machine = must(vm.New(b.Graph(), device, vm.Keep(keep...)))
	return t
}

// competition is minus the logarithm of the probability of what was taken, among all that competes,
// summed over this rank's interactions.
func (t *trainer) competition() (layers.Node, error) {
	user := must(G.Reshape(t.rows[0], tensor.Shape{t.own, t.width, 1}))
	scores := must(nn.BatchedMatMul(false, false, t.rows[1], user))
	scores = must(G.Reshape(scores, tensor.Shape{t.own, 1 + t.negatives}))
	taken := G.NewVector(scores.Graph(), tensor.Int, G.WithShape(t.own), G.WithName("taken"),
		G.WithInit(G.Zeroes())) // the first of each
	loss, err := nn.CrossEntropyWith(nn.CrossEntropyOptions{Reduction: nn.SumOfRows}, scores,
		taken)
	return layers.Whole(loss), err // for Table.Step adds up what ranks have
}

// train trains until all epochs are over.
func (t *trainer) train() {
	began := time.Now()
	for epoch := 1; epoch <= t.epochs; epoch++ {
		e, start := fit.Epoch{Epoch: epoch, Steps: epoch * t.steps}, time.Now()
		for step := e.Steps - t.steps; step < e.Steps; step++ {
			rate := t.rate * (1 - float64(step)/float64(t.epochs*t.steps))
			e.Loss += t.step(uint64(step), rate) / float64(t.steps)
		}
		e.Seconds = time.Since(start).Seconds()
		e.Metrics = map[string]float64{"recall": t.recall(t.model())}
		fmt.Fprintf(t.out, "epoch %d/%d: loss=%.*f recall@%d=%.4f steps/s=%.0f\n", epoch, t.epochs,
			t.digits, e.Loss, first, e.Metrics["recall"], float64(t.steps)/e.Seconds)
		t.past = append(t.past, e)
		if t.curve != "" && t.comm.Rank() == 0 {
			f := must(os.Create(t.curve))
			check(errors.Join(curves.SVG(f, t.past), f.Close()))
		}
	}
	h, all := sha256.New(), make([]byte, t.comm.Size()*sha256.Size)
	for _, table := range t.tables {
		check(binary.Write(h, binary.LittleEndian, table.Rows().Data()))
	}
	check(backend.Run(t.comm, backend.Collective{Kind: backend.AllGather}, backend.Of(all),
		backend.Of(h.Sum(nil))))
	popularity := t.recall(func(_, _, item int) float64 { return t.chance(-1, item) })
	best := t.recall(func(_, user, item int) float64 { return t.chance(t.taste(user), item) })
	fmt.Fprintf(t.out, "recall@%d=%.4f popularity=%.4f best=%.4f ranks=%d backend=%s params=%x "+
		"seconds=%.1f\n", first, t.recall(t.model()), popularity, best, t.comm.Size(),
		t.comm.Capabilities().Backend, sha256.Sum256(all), time.Since(began).Seconds())
}

// step takes a step of gradient descent, and returns the mean loss of the batch.
func (t *trainer) step(step uint64, rate float64) float64 {
	who, what := t.interactions(step, t.batch, t.negatives)
	check(t.tokens[0].Set(t.share(who)))
	check(t.tokens[1].Set(t.share(what)))
	check(t.machine.RunAll())
	for _, table := range t.tables {
		check(table.Step(&solver.SGD{Rate: rate}))
	}
	loss := t.loss.Value().Data().(float64)
	check(autograd.Sum(t.comm, &loss))
	return loss / float64(t.batch)
}

// share returns this rank's part.
func (t *trainer) share(all []int) []int {
	n := len(all) / t.comm.Size()
	return all[t.comm.Rank()*n:][:n]
}

// model returns the score of an item for user k of those that were set last. Tokens that are set
// bring rows, without a run.
func (t *trainer) model() func(k, user, item int) float64 {
	var vectors []float64 // of all items
	ids := make([]int, t.own*(1+t.negatives))
	for at := 0; at < t.items; at += len(ids) {
		for i := range ids {
			ids[i] = min(at+i, t.items-1)
		}
		check(t.tokens[1].Set(ids))
		vectors = append(vectors, t.rows[1].Value().Data().([]float64)...)
	}
	return func(k, _, item int) (score float64) {
		for d, x := range t.rows[0].Value().Data().([]float64)[k*t.width:][:t.width] {
			score += x * vectors[item*t.width+d]
		}
		return score
	}
}

// recall returns the share of held-out interactions whose item is among the first by a score.
func (t *trainer) recall(score func(k, user, item int) float64) (found float64) {
	for i := range heldOut {
		who, what := t.interactions(math.MaxUint64-uint64(i), t.batch, 0)
		who, what = t.share(who), t.share(what)
		check(t.tokens[0].Set(who))
		for k, user := range who {
			own, before := score(k, user, what[k]), 0
			for j := 0; j < t.items && before < first; j++ {
				if s := score(k, user, j); s > own || s == own && j < what[k] {
					before++
				}
			}
			if before < first {
				found++
			}
		}
	}
	check(autograd.Sum(t.comm, &found))
	return found / float64(heldOut*t.batch)
}

func check(err error) { usage.End("recommender", err) }

func must[T any](value T, err error) T {
	check(err)
	return value
}

// world is what interactions are drawn from. Users and items are in clusters. Four times in five a
// user takes an item of the same cluster, and else any item. A few users are busy, and a few
// clusters and items popular: the chance of number i falls like 1/(i + a constant).
type world struct{ users, items int }

const (
	clusters = 20 // item i is in cluster i modulo clusters
	loyal    = 0.8
	busy     = 1000 // the constants, of users,
	wide     = 5    // clusters,
	popular  = 3    // and the items of a cluster
)

// skewed draws a number below n by a constant a.
func skewed(r *rand.Rand, n int, a float64) int {
	return min(n-1, int(a*(math.Pow(1+float64(n)/a, r.Float64())-1)))
}

// taste returns the cluster of a user.
func (w world) taste(user int) int {
	return skewed(rand.New(rand.NewPCG(seed, uint64(user))), clusters, wide)
}

// interactions draws users and what each has taken, in front of others that it is to compete with.
func (w world) interactions(stream uint64, n, others int) (who, what []int) {
	r := rand.New(rand.NewPCG(seed+1, stream))
	for range n {
		user := skewed(r, w.users, busy)
		cluster := w.taste(user)
		if r.Float64() >= loyal {
			cluster = skewed(r, clusters, wide)
		}
		who = append(who, user)
		what = append(what, skewed(r, w.items/clusters, popular)*clusters+cluster)
		for range others {
			what = append(what, r.IntN(w.items))
		}
	}
	return who, what
}

// chance is proportional to the chance that a user of a taste takes an item; without one, -1, to
// the popularity of the item.
func (w world) chance(taste, item int) float64 {
	p := (1 - loyal) * math.Log1p(1/float64(wide+item%clusters)) / math.Log1p(clusters/wide)
	if item%clusters == taste {
		p += loyal
	}
	return p * math.Log1p(1/float64(popular+item/clusters))
}
