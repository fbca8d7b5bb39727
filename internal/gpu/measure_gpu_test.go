//go:build gpu

package gpu

import (
	"os"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// Nothing is shipped for GPUs of PCIe, as which those of this machine pass here.
func TestKernelsAreMeasuredAsRanksConnectOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	noFile(t)
	g.Options = &Options{Link: PCIe}
	if os.Getenv("EMULATED_DEVICES") != "" { // whose calls take milliseconds
		g.quick = quick{time.Minute, 16 << 10}
	}
	for _, what := range []string{"measured", "read what was measured"} {
		began := time.Now()
		c := g.nccl(t, 2, time.Minute)[1].(*Communicator)
		t.Logf("two ranks connected and %s in %v", what, time.Since(began))
		r := c.row(backend.AllReduce, backend.F32)
		if r == nil || !r.Quick || r.Samples[0].NCCL <= 0 || r.Samples[0].OneShot <= 0 {
			t.Fatalf("%+v: %s", r, c.lacks)
		}
		for _, r := range c.plan.Table[len(Shipped()):] {
			t.Log(r)
		}
	}
}
