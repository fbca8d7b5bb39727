package plan_test

import (
	"os"
	"testing"

	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/internal/vm/proof"
)

func TestMain(m *testing.M) {
	plan.ProveWith(proof.Verify)
	os.Exit(m.Run())
}
