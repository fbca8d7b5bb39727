package half_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"sync"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
)

// Two ranks add their elements, which travel in 16 bits: f16 has 11 bits of precision.
func ExampleWrap() {
	os.Setenv("EURYALE_BACKEND", "host") // where the operands below are
	compress := half.Wrap(backend.F16)
	err := euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		short, err := compress(comm)
		if err != nil {
			return err
		}
		x := []float32{1, 0.5, 1e-9, 2049}
		sum := backend.Collective{Kind: backend.AllReduce, Op: backend.Sum}
		if err := backend.Run(short, sum, backend.Of(x), backend.Of(x)); err != nil {
			return err
		}
		if comm.Rank() == 0 {
			fmt.Println(x)
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: [2 1 0 4096]
}
