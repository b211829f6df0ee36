"""Human resources: departments, employees, the projects they work on and the trainings they take."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import CITIES, amount, day, depending, integer, later, listed, person, pick, title

COMPANY = Domain(
    "company",
    (
        Table("departments", "department", 20, (
            key("department_id"), label("department_name", listed(
                "Finance", "Marketing", "Legal", "Research", "Sales", "Support", "Logistics", "Design", "Security", "Quality",
                "Purchasing", "Payroll", "Recruiting", "Analytics", "Production", "Maintenance", "Compliance", "Training",
                "Facilities", "Engineering", "Accounting", "Strategy")),
            category("location", pick(*CITIES[:4])), measure("budget", amount(80000, 2400000, 0)),
        )),
        Table("employees", "employee", 130, (
            key("employee_id"), label("employee_name", person()), ref("department_id", "departments"),
            category("job_title", pick("analyst", "engineer", "manager", "assistant")),
            measure("salary", depending("job_title", {"analyst": (42000, 78000), "engineer": (48000, 98000),
                                                      "manager": (65000, 145000), "assistant": (28000, 46000)})),
            date("hire_date", day(2006, 2023)), date("exit_date", later("hire_date", 60, 600), null=0.75),
        )),
        Table("projects", "project", 50, (
            key("project_id"), label("project_name", title("Project Initiative", "Atlas Beacon Comet Delphi Echo Falcon Gemini "
                                                           "Horizon Iris Juno Kepler Lotus Mercury Nova Orion Pegasus Quartz "
                                                           "Raven Sierra Titan Umbra Vega Willow Xenon Zephyr Aurora Basalt")),
            ref("department_id", "departments"), category("phase", pick("active", "planned", "finished", "paused")),
            measure("cost", amount(5000, 620000, 0)), date("deadline", day(2022, 2026), null=0.15),
        )),
        Table("assignments", "assignment", 260, (
            key("assignment_id"), ref("employee_id", "employees"), ref("project_id", "projects"),
            category("assignment_role", pick("developer", "tester", "lead", "advisor")),
            measure("workload", integer(4, 320), "INTEGER"),
        )),
        Table("trainings", "training", 150, (
            key("training_id"), ref("employee_id", "employees"),
            category("topic", pick("safety", "leadership", "python", "negotiation")), date("training_date", day(2020, 2024)),
            level("test_score", integer(30, 100), null=0.2),
        )),
    ),
)  # fmt: skip
