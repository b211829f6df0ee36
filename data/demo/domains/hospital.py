"""A hospital: wards, doctors, patients, their visits and what was prescribed."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import CITIES, amount, day, integer, listed, person, pick

HOSPITAL = Domain(
    "hospital",
    (
        Table("wards", "ward", 20, (
            key("ward_id"), label("ward_name", listed(
                "Cardiology", "Neurology", "Pediatrics", "Oncology", "Surgery", "Radiology", "Maternity", "Intensive Care",
                "Urology", "Dermatology", "Orthopedics", "Psychiatry", "Geriatrics", "Emergency", "Hematology", "Nephrology",
                "Rehabilitation", "Pulmonology", "Endocrinology", "Ophthalmology", "Rheumatology", "Infectious Diseases")),
            category("building", pick("main", "east", "annex")), level("floor", integer(1, 6)),
            measure("bed_count", integer(8, 48), "INTEGER"),
        )),
        Table("doctors", "doctor", 50, (
            key("doctor_id"), label("doctor_name", person()), ref("ward_id", "wards"),
            category("doctor_rank", pick("resident", "specialist", "consultant", "chief")),
            measure("salary", amount(52000, 190000, 0)), date("license_date", day(1988, 2020)),
        )),
        Table("patients", "patient", 120, (
            key("patient_id"), label("patient_name", person()), category("insurance_plan", pick("public", "private")),
            category("blood_type", pick("O", "A", "B", "AB")), category("city", pick(*CITIES[:5])),
            date("birth_date", day(1935, 2018)), level("body_weight", amount(18, 120, 1), "REAL", null=0.1),
        )),
        Table("visits", "visit", 240, (
            key("visit_id"), ref("patient_id", "patients"), ref("doctor_id", "doctors"),
            category("visit_type", pick("checkup", "emergency", "follow-up", "surgery")),
            measure("fee", amount(40, 2800)), date("visit_date", day(2021, 2024)),
            category("outcome", pick("recovered", "referred", "admitted"), null=0.2),
        )),
        Table("prescriptions", "prescription", 180, (
            key("prescription_id"), ref("visit_id", "visits"),
            category("drug", pick("ibuprofen", "amoxicillin", "metformin", "insulin", "aspirin")),
            level("dose", integer(5, 500)), measure("treatment_length", integer(3, 60), "INTEGER", null=0.15),
        )),
    ),
)  # fmt: skip
