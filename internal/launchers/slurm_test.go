package launchers

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestSlurmLists(t *testing.T) {
	for list, want := range map[string]string{
		"": "", "a": "a", "a,b": "a", "gpu[03-05,9],login": "gpu03", "gpu[7,9]": "gpu7",
		"r[1-2]n[4-5]": "r1n4", "n[01]-ib,x": "n01-ib",
	} {
		require.Equal(t, fmt.Sprintf("firstHost(%q)", list), firstHost(list), want)
	}
	for node, want := range []int{2, 2, 2, 1} {
		require.Equal(t, fmt.Sprint("tasks on node ", node),
			require.Value(tasksOn("2(x3),1", node))(t), want)
	}
	require.Fails(t, "no error for a node beyond the list", require.Err(tasksOn("2(x3),1", 4)))
}
