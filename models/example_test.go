package models_test

import (
	"fmt"
	"log"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/vm"
)

// A model of a folder is tuned with LoRA for some steps. Solo is a communicator of one rank; a
// program of several gets its own of euryale.Init, and changes nothing else.
func Example() {
	m, err := models.Load("testdata/llama3")
	check(err)
	defer m.Close()
	check(m.Adapt(models.LoRA{Rank: 4, Targets: []string{"q_proj", "v_proj", "o_proj"}}))
	l, err := layers.NewLayout(autograd.Solo(), 0, 1, 1)
	check(err)
	defer l.Close()
	b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
	tokens, targets := b.Tokens("tokens", 1, 1, 4), b.Tokens("targets", 1, 1, 4)
	logits, err := m.Logits(b, tokens)
	check(err)
	loss := b.CrossEntropy(logits, targets)
	learnables, err := b.Grad(loss)
	check(err)
	machine, err := vm.New(b.Graph(), nil, vm.Keep(loss.Node),
		vm.WithSolver(&solver.Adam{Rate: 0.01}, learnables...),
		b.Training())
	check(err)
	defer machine.Close()
	for step := range 40 {
		check(tokens.Set([]int{5, 9, 2, 7}))
		check(targets.Set([]int{9, 2, 7, 11}))
		check(machine.RunAll())
		if step == 0 || step == 39 {
			fmt.Println("loss above 1:", loss.Value().Data().(float32) > 1)
		}
	}
	// Output:
	// loss above 1: true
	// loss above 1: false
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
