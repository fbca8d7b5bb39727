package plan_test

import (
	"os"
	"testing"

	"github.com/euryale-ml/euryale/vm/internal/plan"
	"github.com/euryale-ml/euryale/vm/internal/proof"
)

func TestMain(m *testing.M) {
	plan.ProveWith(proof.Verify)
	os.Exit(m.Run())
}
