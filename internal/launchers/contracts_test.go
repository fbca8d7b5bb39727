package launchers

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/testing/contracts"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// places returns the variables of each process of a case, on four machines of two ranks.
func places(c contracts.Case) (all [][]string) {
	const machines = 4
	for m := range machines {
		for l := range 2 {
			switch {
			case !c.Machines:
				all = append(all, c.Of(m, machines, l, 2))
			case l == 0:
				all = append(all, c.Of(m, machines, 0, 1))
			}
		}
	}
	return all
}

func TestEachContractGivesEveryProcessItsRank(t *testing.T) {
	for _, c := range contracts.All() {
		var job string
		all := places(c)
		for rank, vars := range all {
			f, err := Rank(env.Lookup(vars))
			switch {
			case c.Refused && (err == nil || !strings.Contains(err.Error(), f.Launcher())):
				t.Errorf("%s is not refused: %v", c.Name, err)
			case c.Refused:
			case err != nil:
				t.Errorf("%s: %v", c.Name, err)
			case f.Rank != rank || f.Size != len(all) || f.Addr == "" || f.Port == 0:
				t.Errorf("%s: process %d of %d: %+v", c.Name, rank, len(all), f.Position)
			case rank > 0 && f.Job != job:
				t.Errorf("%s: job %q, and of rank 0 %q", c.Name, f.Job, job)
			case rank == 0:
				job = f.Job
			}
			m, err := Machine(env.Lookup(vars))
			if !c.Refused && (err != nil || m.Rank != rank || m.Size != len(all)) {
				t.Errorf("%s: of a launcher: %+v, %v", c.Name, m.Position, err)
			}
		}
	}
}

// Whatever is lost of a job's variables, as in a container that gets some of them, no program
// trains alone.
func TestNoPartOfAContractMakesAProgramTrainAlone(t *testing.T) {
	for _, c := range contracts.All() {
		if c.Name == "Volcano, tasks of two names" {
			continue // one name's variables are a whole job's
		}
		all := places(c)
		for _, vars := range [][]string{all[0], all[1], all[len(all)-1]} {
			signs := slices.DeleteFunc(slices.Clone(vars), func(entry string) bool {
				return !isSign(entry)
			})
			for part := 1; part < 1<<len(signs); part++ {
				var some []string
				for i, entry := range signs {
					if part>>i&1 == 1 {
						some = append(some, entry)
					}
				}
				rest := slices.DeleteFunc(slices.Clone(vars), isSign)
				for _, with := range [][]string{nil, rest} {
					f, err := Rank(env.Lookup(append(some, with...)))
					require.That(t, err != nil || f.Size != 1, "%s: alone with %v and %v", c.Name,
						some, with)
				}
			}
		}
	}
}

// isSign reports whether a variable is one that only a job has.
func isSign(entry string) bool {
	isSet := func(sign string) bool { return env.Lookup([]string{entry})(sign) != "" }
	return entry != "PBS_NODENUM=0" && slices.ContainsFunc(All(), func(c Contract) bool {
		return slices.ContainsFunc(c.SignNames(), isSet)
	})
}

func TestContractsOfOneRankJoinAlone(t *testing.T) {
	for _, c := range contracts.All() {
		vars := c.Of(0, 1, 0, 1)
		f, err := Rank(env.Lookup(vars))
		saysNoSize := strings.HasPrefix(c.Name, "Volcano, t") || c.Name == "pbsdsh" ||
			c.Name == "PMIx" || c.Name == "mlx.launch with a ring"
		require.Check(t, saysNoSize == (err != nil) && (err != nil || f.Rank == 0 && f.Size == 1),
			"%s: %+v, %v", c.Name, f.Position, err)
		says := "not say which of how many"
		require.Check(t, c.Name != "pbsdsh" || strings.Contains(fmt.Sprint(err), says),
			"%s: no %q in %v", c.Name, says, err)
	}
}

// Numbers that are none, and ranks that are too large, are errors that name the variable, or are
// left to those who check ranges.
func TestMalformedNumbersAreRefused(t *testing.T) {
	for _, c := range contracts.All() {
		for _, vars := range places(c) {
			for i, entry := range vars {
				name, value, _ := strings.Cut(entry, "=")
				if !isSign(entry) || strings.Trim(value, "0123456789") != "" {
					continue
				}
				for _, bad := range []string{"x", "-1", "1.5", "9999999999999999999999"} {
					wrong := slices.Clone(vars)
					wrong[i] = name + "=" + bad
					f, err := Rank(env.Lookup(wrong))
					require.Check(t, err != nil || f.Size != 1, "%s: alone with %s=%s", c.Name,
						name, bad)
				}
			}
		}
	}
}

// A launcher inside another one: the inner one's place counts, or both are named.
func TestTwoContractsAtOnceJoinOrAreNamed(t *testing.T) {
	cases := contracts.All()
	order := func(f *Found) int {
		return slices.IndexFunc(All(), func(c Contract) bool { return c.Name == f.Of.Name })
	}
	for _, inner := range cases {
		for _, outer := range cases {
			one := inner.Of(1, 4, 1, 2)
			f, err := Rank(env.Lookup(one))
			if err != nil {
				continue // alone, it is refused
			}
			for _, machines := range []int{1, 4} {
				if outer.Name == "euryale run" && inner.Machines {
					continue // it has looked at these
				}
				two := slices.Concat(outer.Of(machines-1, machines, 0, 1), one)
				both, err := Rank(env.Lookup(two))
				switch {
				case err != nil:
					named := strings.Contains(err.Error(), both.Launcher())
					require.Check(t, named, "%s in %s of %d: %v", inner.Name, outer.Name, machines,
						err)
				case both.Size == 1:
					t.Errorf("%s in %s of %d: alone", inner.Name, outer.Name, machines)
				case both.Of.Name != f.Of.Name && order(both) > order(f):
					t.Errorf("%s in %s of %d: %s counts", inner.Name, outer.Name, machines,
						both.Launcher())
				}
			}
		}
	}
}

// A job of this machine alone, started once on each of several machines, is as many trainings.
func TestJobsOfOneMachineInsideSeveralAreRefusedByNamingBoth(t *testing.T) {
	inner := map[string]string{
		"torchrun": "RANK=%d WORLD_SIZE=2 LOCAL_RANK=%[1]d LOCAL_WORLD_SIZE=2 " +
			"MASTER_ADDR=127.0.0.1 MASTER_PORT=1",
		"mpirun": "OMPI_COMM_WORLD_RANK=%d OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=n " +
			"OMPI_COMM_WORLD_LOCAL_RANK=%[1]d OMPI_COMM_WORLD_LOCAL_SIZE=2",
	}
	for _, outer := range contracts.All() {
		if !outer.Machines || outer.Name == "PyTorchJob" { // whose RANK counts
			continue
		}
		for machine := range 4 {
			for name, vars := range inner {
				refused := 0
				for rank := range 2 {
					all := append(outer.Of(machine, 4, 0, 1),
						strings.Fields(fmt.Sprintf(vars, rank))...)
					_, err := Rank(env.Lookup(all))
					if err != nil && strings.Contains(err.Error(), name) &&
						strings.Contains(err.Error(), "EURYALE_ALONE=1") {
						refused++
					}
					f, err := Rank(env.Lookup(append(all, "EURYALE_ALONE=1")))
					require.Check(t, err == nil && f.Launcher() == name && f.Size == 2,
						"%s of %s with EURYALE_ALONE=1: %v", name, outer.Name, err)
				}
				require.Check(t, refused != 0, "%s on machine %d of %s is not refused", name,
					machine, outer.Name)
			}
		}
	}
}

// What any machine may have says nothing of a job.
func TestVariablesOfPlacesAreNoSigns(t *testing.T) {
	for what, vars := range map[string]string{
		"the shell of salloc": "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_NNODES=4 " +
			"SLURM_TASKS_PER_NODE=2(x4) SLURM_JOB_NODELIST=a[0-3] SLURM_NPROCS=8",
		"salloc with an interactive step": "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_NNODES=4 " +
			"SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1 " +
			"SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=1",
		"a batch script": "ENVIRONMENT=BATCH SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0 " +
			"SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NNODES=4 SLURM_TASKS_PER_NODE=2(x4)",
		"any pod":         "KUBERNETES_SERVICE_HOST=10.0.0.1 HOSTNAME=train-1 KUBERNETES_PORT=443",
		"a script of LSF": "LSB_JOBID=7 LSB_HOSTS=a;a;b;b LSB_DJOB_NUMPROC=4",
		"a script of PBS": "PBS_JOBID=7 PBS_NODEFILE=/x PBS_TASKNUM=1 PBS_NODENUM=0",
		"one host":        `SM_HOSTS=["algo-1"] SM_CURRENT_HOST=algo-1 SM_NUM_GPUS=8`,
		"one replica": `CLUSTER_SPEC={"cluster":{"workerpool0":["a:1"]},"task":` +
			`{"type":"workerpool0","index":0}} TF_CONFIG={"cluster":{"chief":["a:1"]}}`,
		"an address": "MASTER_ADDR=localhost MASTER_PORT=29500 EURYALE_JOB=j",
		"one pod": "PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=a " +
			"PET_MASTER_PORT=1 JOB_COMPLETION_INDEX=0",
		"one node": "SKYPILOT_NUM_NODES=1 SKYPILOT_NODE_RANK=0 SKYPILOT_NODE_IPS=10.0.0.1",
	} {
		for _, find := range []func(Lookup) (*Found, error){Rank, Machine} {
			require.Equal(t, what, require.Value(find(env.Lookup(strings.Fields(vars))))(t).Size, 1)
		}
	}
}

// Any mixture of the variables of all contracts gives a place or an error, and the same whatever
// their order.
func TestMixturesAreReadTheSameInAnyOrder(t *testing.T) {
	var all []string
	for _, c := range contracts.All() {
		if c.Name == "Volcano, tasks of two names" {
			continue
		}
		all = append(all, c.Of(rand.IntN(4), 4, 0, 1)...)
	}
	for range 2000 {
		some := slices.Clone(all)
		rand.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
		some = slices.CompactFunc(some[:1+rand.IntN(12)], func(a, b string) bool { return a == b })
		seen := map[string]bool{}
		some = slices.DeleteFunc(some, func(entry string) bool {
			name, _, _ := strings.Cut(entry, "=")
			again := seen[name]
			seen[name] = true
			return again
		})
		a, errA := Rank(env.Lookup(some))
		slices.Reverse(some)
		b, errB := Rank(env.Lookup(some))
		require.That(t, fmt.Sprint(a.Position, errA) == fmt.Sprint(b.Position, errB),
			"%v: %+v %v, else %+v %v", some, a.Position, errA, b.Position, errB)
		if errA == nil && a.Size == 1 && slices.ContainsFunc(some, isSign) {
			t.Fatalf("alone with %v", some)
		}
	}
}
