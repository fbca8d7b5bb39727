package bucket_test

import (
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net/http/httptest"
	"os"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/bucket"
	"github.com/euryale-ml/euryale/internal/testing/objectstore"
	"github.com/euryale-ml/euryale/vm"
)

// A training goes on from the bucket, if that has a checkpoint, and saves there. On a cluster its
// address and the credentials are in the environment already.
func Example() {
	store, err := objectstore.New()
	check(err)
	here := httptest.NewServer(store)
	defer here.Close()
	for name, value := range objectstore.Variables(here.URL) {
		check(os.Setenv(name, value))
	}

	g := gorgonia.NewGraph()
	w := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(2), gorgonia.WithName("w"),
		gorgonia.WithInit(gorgonia.Ones()))
	_, err = gorgonia.Grad(gorgonia.Must(gorgonia.Sum(w)), w)
	check(err)
	m, err := vm.New(g, nil, vm.WithSolver(&solver.SGD{Rate: 0.5}, w),
		vm.WithDataParallel(autograd.Solo(), autograd.WithStore(bucket.Open),
			autograd.WithNotice(func(text string) { fmt.Println(text) })))
	check(err)
	defer m.Close()

	const dir = "s3://bucket/run1"
	step := 0
	err = m.DataParallel().Load(dir, m.Solver(), &step)
	if fmt.Println("from step", step); !errors.Is(err, fs.ErrNotExist) {
		check(err)
	}
	for ; step < 3; step++ {
		check(m.RunAll())
		check(m.DataParallel().Save(dir, m.Solver(), step+1))
	}
	weights, err := autograd.ReadWeights(dir, bucket.Open)
	check(err)
	fmt.Println(weights["w"].Data())
	// Output:
	// from step 0
	// s3://bucket/run1: its file system has no locks: do not let two jobs save there
	// [-0.5 -0.5]
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
