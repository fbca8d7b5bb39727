package euryale

import "github.com/euryale-ml/euryale/internal/exit"

// ExitStatus returns the exit status of a program that ends with an error, as docs/running.md lists
// them: 0 for nil, that of the error's method ExitCode if it has one, such as 143 after SIGTERM for
// a fit.ErrStopped and 2 for a wrong environment, and otherwise 1. Whoever starts programs again,
// such as Slurm, Kubernetes or euryale run --max-restarts, then knows what is finished. Close the
// communicator first, so that the others do not lose this rank:
//
//	err = errors.Join(train(comm), comm.Close())
//	if err != nil {
//		log.Print(err)
//	}
//	os.Exit(euryale.ExitStatus(err))
func ExitStatus(err error) int { return exit.Of(err) }
