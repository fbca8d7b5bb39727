package autograd_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
)

func ExampleRows() {
	images := tensor.New(tensor.WithShape(4, 2),
		tensor.WithBacking([]float32{0, 1, 10, 11, 20, 21, 30, 31}))
	batch := tensor.New(tensor.WithShape(3, 2), tensor.Of(tensor.Float32))
	if err := autograd.Rows(batch, images, []int{3, 1}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(batch.Data())
	fmt.Println(autograd.Rows(batch, images, []int{4}))
	// Output:
	// [30 31 10 11 0 0]
	// autograd: rows: bad argument: row 0 of the batch is number 4: there are 4, from 0
}

// Two ranks share batches of four of ten samples: the same shuffle on both, another half on each.
func ExampleNewSampler() {
	onRanks(2, func(comm backend.Communicator) error {
		sampler, err := autograd.NewSampler(comm, 10, 4, 1)
		if err == nil {
			fmt.Println("rank", comm.Rank(), sampler.Epoch(0))
		}
		return err
	})
	// Unordered output:
	// rank 0 [[3 9] [7 6]]
	// rank 1 [[8 5] [4 1]]
}

// Three ranks evaluate eight samples, two at a time.
func ExampleEvaluation() {
	onRanks(3, func(comm backend.Communicator) error {
		shares, err := autograd.Evaluation(comm, 8, 2)
		if err == nil {
			fmt.Println("rank", comm.Rank(), shares)
		}
		return err
	})
	// Unordered output:
	// rank 0 [[0 1] [6 7]]
	// rank 1 [[2 3] []]
	// rank 2 [[4 5] []]
}

// onRanks runs f on ranks that are goroutines of this process.
func onRanks(n int, f func(comm backend.Communicator) error) {
	err := euryale.Run(context.Background(), n, func(comm backend.Communicator,
		_ sync.Locker) error {
		return f(comm)
	})
	if err != nil {
		log.Fatal(err)
	}
}

func ExampleMean() {
	onRanks(4, func(comm backend.Communicator) error {
		loss, seconds := float64(comm.Rank()), 0.5
		if err := autograd.Mean(comm, &loss, &seconds); err != nil {
			return err
		}
		if comm.Rank() == 0 {
			fmt.Println(loss, seconds)
		}
		return nil
	})
	// Output: 1.5 0.5
}

// Ranks that have seen different numbers of samples count by them.
func ExampleSum() {
	onRanks(2, func(comm backend.Communicator) error {
		correct, seen := 7.0, 8.0
		if comm.Rank() == 1 {
			correct, seen = 1, 2
		}
		if err := autograd.Sum(comm, &correct, &seen); err != nil {
			return err
		}
		if comm.Rank() == 0 {
			fmt.Println(correct/seen, "of", seen)
		}
		return nil
	})
	// Output: 0.8 of 10
}

// One rank is told to end, and all end after the same step.
func ExampleAny() {
	onRanks(3, func(comm backend.Communicator) error {
		for step := 0; ; step++ {
			told := comm.Rank() == 1 && step == 5
			stop, err := autograd.Any(comm, told)
			if err != nil {
				return err
			}
			if stop {
				if comm.Rank() == 0 {
					fmt.Println("all ranks end before step", step)
				}
				return nil
			}
		}
	})
	// Output: all ranks end before step 5
}

// A checkpoint holds parameters, the solver's state and the program's own progress. Another job
// loads it, here on another number of ranks.
func ExampleDataParallel_Save() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	checkpoint := filepath.Join(dir, "checkpoint")
	with := func(ranks int, f func(comm backend.Communicator, dp *autograd.DataParallel,
		w *gorgonia.Node) error) {
		err := euryale.Run(context.Background(), ranks, func(comm backend.Communicator,
			build sync.Locker) error {
			build.Lock()
			w := gorgonia.NewVector(gorgonia.NewGraph(), tensor.Float64, gorgonia.WithName("w"),
				gorgonia.WithShape(2),
				gorgonia.WithValue(tensor.New(tensor.WithBacking([]float64{1, 2}))))
			build.Unlock()
			dp, err := autograd.New(comm, gorgonia.Nodes{w})
			if err != nil {
				return err
			}
			defer dp.Close()
			return f(comm, dp, w)
		})
		if err != nil {
			log.Fatal(err)
		}
	}
	with(2, func(_ backend.Communicator, dp *autograd.DataParallel, w *gorgonia.Node) error {
		copy(w.Value().Data().([]float64), []float64{3, 4}) // as training does
		return dp.Save(checkpoint, &solver.Adam{}, progress{Epoch: 7})
	})
	with(3, func(comm backend.Communicator, dp *autograd.DataParallel, w *gorgonia.Node) error {
		var at progress
		err := dp.Load(checkpoint, &solver.Adam{}, &at)
		if comm.Rank() == 2 {
			fmt.Println("epoch", at.Epoch, w.Value().Data())
		}
		return err
	})
	files, err := filepath.Glob(filepath.Join(checkpoint, "step-00000000", "*"))
	for _, file := range files {
		fmt.Println(filepath.Base(file), err)
	}
	// Output:
	// epoch 7 [3 4]
	// checkpoint.json <nil>
	// model.safetensors <nil>
}

// A file of weights has a model without its solver, for inference or for another training. Its
// tensors have the names of the graph's nodes; Python's safetensors reads it, too.
func ExampleSaveWeights() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "model.safetensors")
	model := func(values ...float64) gorgonia.Nodes {
		return gorgonia.Nodes{gorgonia.NewVector(gorgonia.NewGraph(), tensor.Float64,
			gorgonia.WithName("layer0.bias"), gorgonia.WithShape(len(values)),
			gorgonia.WithValue(tensor.New(tensor.WithBacking(values))))}
	}
	if err := autograd.SaveWeights(file, model(3, 4)); err != nil {
		log.Fatal(err)
	}
	loaded := model(0, 0)
	if err := autograd.LoadWeights(file, loaded); err != nil {
		log.Fatal(err)
	}
	fmt.Println(loaded[0].Name(), loaded[0].Value().Data())
	// Output: layer0.bias [3 4]
}

// Fine-tuning: the new head is not in the file, and the file's head is not in the model.
func ExampleNonStrict() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "model.safetensors")
	model := func(head string, body float64) gorgonia.Nodes {
		g := gorgonia.NewGraph()
		return gorgonia.Nodes{
			gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName("body"),
				gorgonia.WithValue(body)),
			gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName(head), gorgonia.WithValue(1.0)),
		}
	}
	if err := autograd.SaveWeights(file, model("old", 5)); err != nil {
		log.Fatal(err)
	}
	tuned := model("new", 0)
	err = autograd.LoadWeights(file, tuned, autograd.NonStrict(func(missing, unexpected []string) {
		fmt.Println("missing", missing, "unexpected", unexpected)
	}))
	fmt.Println(tuned[0].Value(), err)
	// Output:
	// missing [new] unexpected [old]
	// 5 <nil>
}
