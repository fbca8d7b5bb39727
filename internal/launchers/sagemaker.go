package launchers

import (
	"fmt"
	"slices"
)

// sageMaker runs a command on each host.
// https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
func sageMaker() Contract {
	return Contract{
		Name: "SageMaker", Machines: true, Signs: []string{"SM_CURRENT_HOST", "SM_HOSTS"},
		Job: []string{"TRAINING_JOB_NAME", "SM_HOSTS"},
		More: func(v *Vars, p *Position) {
			var hosts []string
			current := v.Text("SM_CURRENT_HOST")
			if !v.JSON("SM_HOSTS", &hosts) || len(hosts) == 0 {
				v.fail(fmt.Errorf("SM_HOSTS has no hosts"))
				return
			}
			p.Size, p.Rank = len(hosts), slices.Index(hosts, current)
			if current != "" && p.Rank < 0 {
				v.fail(fmt.Errorf("SM_CURRENT_HOST=%s is not in SM_HOSTS=%v", current, hosts))
			}
			p.Addr = hosts[0]
		}}
}
